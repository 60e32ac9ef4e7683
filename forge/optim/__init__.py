"""Optimizers and their schedules, by name, and their state."""
