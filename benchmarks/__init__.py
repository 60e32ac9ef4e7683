"""Benchmarks that anyone can rerun: `python -m benchmarks.<name> [--json]`. What each measures: README.md beside."""
