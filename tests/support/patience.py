"""How long a test waits for what must come."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 900.0
"""Seconds. It ends a test that hangs, and says nothing about speed: what is waited for takes seconds, on a busy machine
a minute."""


def until(holds: Callable[[], object], never: str = "it never came") -> None:
    """Wait for what nobody announces."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, never
        time.sleep(0.01)
