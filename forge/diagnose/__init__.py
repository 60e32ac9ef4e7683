"""Diagnosis: checks of every fit, and explanations of errors."""
