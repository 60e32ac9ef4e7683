"""Utilities that know nothing of training: text, files, memory errors."""
