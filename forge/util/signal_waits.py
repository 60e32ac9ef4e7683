"""The signals that end a run, and waiting in native code without losing them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1")
ECHO = 2.0
"""Seconds within which repeated signals count as one: a scheduler signals all processes, and a launcher forwards it."""


@contextmanager
def signals_act_at_once() -> Iterator[None]:
    """Let signals end the process while it waits in native code, where no Python handler runs: before training, when
    nothing needs saving."""
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
