"""Object storage: checkpoints and weights at URLs."""
