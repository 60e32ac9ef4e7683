"""Signals that end an examination at once, with what it has."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn


def take_signals() -> dict[int, Any]:
    """Raise at once when a signal asks to leave; return the handlers that were there."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    asked = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, _leave) for number in asked}


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end what is inside."""
    before = take_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
