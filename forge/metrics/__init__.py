"""Metrics: means that stay on the device, torchmetrics objects, and what is logged beside numbers."""
