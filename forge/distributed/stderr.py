"""Telling: what is printed when a run of several ranks fails, straight to stderr and never twice."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from typing import Any

from torch.distributed import DistError

ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|gloo|nccl|process ?group|socket|remote process|recv", re.I
)
"""How errors sound that come of another rank's failure."""


def is_echo(error: BaseException) -> bool:
    """Whether it sounds like the consequence of another rank's failure."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and bool(ECHO.search(str(error))))


def write(text: str) -> None:
    """Straight to stderr, in one piece: no lock of another thread is waited for, and no line of it torn."""
    with suppress(OSError):
        os.write(2, f"{text.rstrip()}\n".encode())


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def print_only_once() -> None:
    """What was printed already is not printed again when it reaches the interpreter."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        if not getattr(error, "__forge_told__", False):
            before(kind, error, trace)

    sys.excepthook = hook
