"""Benchmarks that anyone can rerun: `python -m benchmarks.<name> [--json]`. README.md describes what each measures."""
