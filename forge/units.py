"""Units: numbers of bytes as people read them."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """ "512 B", "1.5 KiB", "17.8 MiB", "139 GiB": three digits that matter, in units of 1024."""
    value, unit = count, UNITS[0]
    for unit in UNITS:
        if abs(value) < 1024 or unit == UNITS[-1]:
            break
        value /= 1024
    # from 999.5 on, three digits would be written with an exponent
    return f"{value:.0f} {unit}" if unit == UNITS[0] or abs(value) >= 999.5 else f"{value:.3g} {unit}"
