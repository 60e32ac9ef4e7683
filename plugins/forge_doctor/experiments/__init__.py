"""Experiments: change one thing, run the task's own step on a copy, compare."""
