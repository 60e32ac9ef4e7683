"""Metrics: means that stay on the device, torchmetrics objects, and images, histograms, texts and embeddings."""
