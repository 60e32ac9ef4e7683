"""What goes, and when: names and options that were renamed work for two more minor versions, with a warning.

::

    from forge import deprecated

    deprecated.warn("TaskModule.borrowed", "TaskModule.is_padding", since="1.0")


    @dataclass(kw_only=True, slots=True)
    class Config:
        max_norm: float = field(default=1.0, metadata={"former": {"norm": "1.0"}})  # `norm` until version 1.0

docs/stability.md lists them all.
"""

from __future__ import annotations

import sys
import warnings

__all__ = ["goes", "warn"]

MINOR_VERSIONS = 2
"""For as many minor versions a former name works."""
READERS = ("torch", "inspect")
"""Packages that read every attribute of what they are given."""


def warn(old: str, new: str, since: str, stacklevel: int = 2) -> None:
    """Warn that `old` was renamed in the version `since`, with its successor and the version in which it goes.

    `stacklevel` says whose line is shown, as in `warnings.warn`: 2 is the caller of the function that warns. Code that
    reads every attribute there is, as torch.jit.script does, uses none of them, and is not warned.
    """
    if sys._getframe(stacklevel).f_globals.get("__name__", "").partition(".")[0] in READERS:
        return
    text = f"{old} is deprecated since forge {since}: use {new}. It goes in forge {goes(since)}."
    warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)


def goes(since: str) -> str:
    """Return the version in which a name goes that was renamed in `since`: "1.0" goes in "1.2"."""
    major, minor = map(int, since.split("."))
    return f"{major}.{minor + MINOR_VERSIONS}"
