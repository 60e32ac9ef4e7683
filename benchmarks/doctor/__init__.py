"""Planted bugs and healthy models, on which `forge doctor` and a plain fit are measured."""
