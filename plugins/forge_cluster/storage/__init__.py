"""Object storage: archives, checkpoints and weights at URLs."""
