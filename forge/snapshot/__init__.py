"""Capture, compare and restore the state of a run."""
