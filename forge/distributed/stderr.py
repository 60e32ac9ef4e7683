"""Print the failure of a run of several ranks: directly to stderr, and only once."""

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
"""Messages of errors that are typical consequences of another rank's failure."""


def is_echo(error: BaseException | None) -> bool:
    """Whether an error looks like the consequence of another rank's failure, or was raised because of one that does."""
    while error is not None:
        if isinstance(error, DistError) or (isinstance(error, RuntimeError) and ECHO.search(str(error))):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def write(text: str) -> None:
    """Write to stderr's descriptor in one call: without waiting for another thread's lock, and without torn lines."""
    with suppress(OSError):
        os.write(2, f"{text.rstrip()}\n".encode())


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def print_only_once() -> None:
    """Keep the interpreter from printing an error again that forge has printed."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        if not getattr(error, "__forge_printed__", False):
            before(kind, error, trace)

    sys.excepthook = hook
