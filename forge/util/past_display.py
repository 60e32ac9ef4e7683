"""Lines that cannot wait, as those of a signal's handler, on a terminal whose last rows a live display redraws."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

rows: Callable[[], int] | None = None
"""How many rows the display has; the cursor is at the end of the last. Set while there is one on stderr."""


def write_line(text: str) -> None:
    """Write a line above the display, without a lock: the display redraws itself below, where it finds as many rows."""
    count = rows() if rows is not None else 0
    erase = "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (count - 1) if count else ""
    with suppress(OSError):  # what reads stderr may be gone by the same signal
        os.write(2, f"{erase}{text}\n{chr(10) * (count - 1)}".encode())


def leave() -> None:
    """Show the cursor again, which the display hides, below its rows: the process ends at once."""
    if rows is not None:
        with suppress(OSError):
            os.write(2, b"\x1b[?25h\n")
