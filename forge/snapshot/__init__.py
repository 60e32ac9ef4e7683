"""Snapshots: a run's state captured, compared and restored."""
