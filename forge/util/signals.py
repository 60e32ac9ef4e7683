"""The signals that end a run, and waiting for something outside of Python without losing them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1")
ECHO = 2.0
"""A scheduler signals all processes of a job, and a launcher passes it on: within so many seconds it is one signal."""


@contextmanager
def signals_act_at_once() -> Iterator[None]:
    """Let signals end the process while it waits outside of Python, where no handler would be called. For waits before
    training, when there is nothing to save yet."""
    handled: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in NAMES:
            number = getattr(signal, name, None)
            if number is not None and callable(signal.getsignal(number)):
                handled[number] = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
