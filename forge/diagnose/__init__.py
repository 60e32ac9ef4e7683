"""Diagnosis: checks of every fit, and errors explained."""
