"""Utilities independent of training: text, files, signals, memory errors."""
