"""The version of forge."""

__version__ = "0.1.0"
