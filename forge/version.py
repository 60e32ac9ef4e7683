"""The version of forge, and what is said of files that a newer one wrote."""

from typing import Any

__version__ = "0.9.0"


def newer(version: Any, known: Any, what: str) -> str:
    """Return the line about a file whose format is newer than the one that is known here; "" if it is not."""
    if type(version) is not int or version <= known:
        return ""
    return f"{what} has format version {version}; this forge reads up to {known}. Use a newer forge."
