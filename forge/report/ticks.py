"""Choose round numbers for axes."""

from __future__ import annotations

import math

SMALLEST = 1e-300
"""Smaller floats lose precision."""


def nice_ticks(lowest: float, highest: float, about: int = 6) -> list[float]:
    """Return round numbers between two values; none if they are too close for arithmetic."""
    raw = (highest - lowest) / about
    if raw < SMALLEST:
        return []
    step = 10 ** math.floor(math.log10(raw))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if factor * step >= raw)
    first, last = math.ceil(lowest / step), math.floor(highest / step)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def log_ticks(lowest: float, highest: float) -> list[float]:
    """Return round numbers between two positive values on a logarithmic axis: powers of ten, with 2 and 5 if few."""
    exponents = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    stride = max(1, len(exponents) // 6)
    factors = (1, 2, 5) if len(exponents) <= 4 else (1,)
    every = [factor * 10.0**exponent for exponent in exponents[::stride] for factor in factors]
    return [float(f"{tick:.1g}") for tick in every if lowest <= tick <= highest]


def tick_text(value: float) -> str:
    """Format a tick, short but exact: "0.25", "40k", "1e-5"."""
    size = abs(value)
    if value and (size >= 1e9 or size < 1e-3):
        return f"{value:.6g}".replace("e-0", "e-").replace("e+0", "e")
    for suffix, unit in (("M", 1e6), ("k", 1e3)):
        if size >= 10 * unit or (size >= unit and unit == 1e6):
            return f"{value / unit:.10g}{suffix}"
    return f"{value:.10g}"
