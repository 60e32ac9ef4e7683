"""The kinds of cases of `benchmarks.faults`, one module each, and what they share."""
