"""Format paths, commands and sizes for people."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path


def short_path(path: str | Path) -> str:
    """Return the path relative to the working directory if inside it, else unchanged."""
    try:
        relative = os.path.relpath(path)
    except FileNotFoundError:  # the working directory was deleted
        return str(path)
    return str(path) if Path(relative).parts[:1] == ("..",) else relative


HIDDEN = {
    **{code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))},  # all but tab and newline
    **{code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))},  # the direction of writing
    **{0xDC00 + byte: f"\\x{byte:02x}" for byte in range(128, 256)},  # bytes of a file name that are not UTF-8
}


def visible(text: str) -> str:
    """Return text for a terminal: control characters, which could move the cursor or hide text, as in "\\x1b[2J"."""
    return text.translate(HIDDEN)


def command(name: str) -> str:
    """Return how to call a program of this environment: by name if the shell finds this one, else by its path."""
    here = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not here.exists() or (found and Path(found).resolve() == here.resolve()):
        return name
    return short_path(here)


def few(names: Iterable[str], most: int = 3, between: str = ", ") -> str:
    """Return the first names and the number of others: "a, b, c and 4 more"."""
    known = list(names)
    return between.join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: float) -> str:
    """Format as "512 B", "1.5 KiB", "17.8 MiB", "139 GiB": three significant digits, in units of 1024."""
    value, unit = count, UNITS[0]
    for unit in UNITS:
        if abs(value) < 1024 or unit == UNITS[-1]:
            break
        value /= 1024
    # from 999.5 on, three significant digits would need an exponent
    return f"{value:.0f} {unit}" if unit == UNITS[0] or abs(value) >= 999.5 else f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """Format as "12 µs", "3.42 ms", "1.2 s", "3 min 20 s", "2 h 05 min", "3 d 04 h"."""
    if seconds < 59.95:
        unit, scale = next((each for each in (("s", 1.0), ("ms", 1e-3)) if seconds >= 0.9995 * each[1]), ("µs", 1e-6))
        return f"{seconds / scale:.3g} {unit}"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 60:
        return f"{minutes} min {whole % 60:02} s"
    return f"{hours} h {minutes % 60:02} min" if hours < 24 else f"{days} d {hours % 24:02} h"
