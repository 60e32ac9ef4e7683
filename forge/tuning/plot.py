"""The plot of a range test: loss against learning rate, with the conclusions marked."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from pathlib import Path

from forge.report.svg import Chart, write_svg
from forge.tuning.lr import LRCurve, rate_text

LOOKS = {"loss of each update": 3, "smoothed": 0, "valley": 2, "steepest": 4, "minimum": 7, "suggestion": 1}
"""Colours of the curves and the marks."""


def draw_lr(curve: LRCurve, title: str, path: str | Path) -> Path:
    """Write the plot as an SVG file, whose name ends in .svg, and return its path."""
    top = shown_range(curve.losses, curve.smoothed)[1]
    losses = {"loss of each update": curve.losses, "smoothed": curve.smoothed}
    series = {name: [(r, min(y, top)) for r, y in zip(curve.rates, ys, strict=True)] for name, ys in losses.items()}
    marks = {"valley": curve.valley, "steepest": curve.steepest, "minimum": curve.minimum}
    marks[f"suggestion {rate_text(curve.suggestion)}"] = curve.suggestion
    marks = {name: rate for name, rate in marks.items() if curve.rates[0] <= rate <= curve.rates[-1]}
    series |= {name: [(rate, min(smoothed_at(curve, rate), top))] for name, rate in marks.items()}
    looks = [(LOOKS.get(name, LOOKS["suggestion"]), 0) for name in series]
    unit = f"loss, cut above {top:.3g}" if max(*curve.losses, *curve.smoothed) > top else "loss"
    chart = Chart(series, title, "learning rate", unit, 960, 540, log_y=False, looks=looks, log_x=True)
    return write_svg(path, chart.draw())


def smoothed_at(curve: LRCurve, rate: float) -> float:
    """Return the smoothed loss at a rate, which may lie between two that were tested."""
    rates, smoothed = curve.rates, curve.smoothed
    i = min(max(bisect.bisect_left(rates, rate), 1), len(rates) - 1)
    if i < 1:
        return smoothed[0]
    share = math.log(rate / rates[i - 1]) / math.log(rates[i] / rates[i - 1])
    return smoothed[i - 1] + min(max(share, 0.0), 1.0) * (smoothed[i] - smoothed[i - 1])


def shown_range(losses: Sequence[float], smoothed: Sequence[float]) -> tuple[float, float]:
    """Return the (lowest, highest) loss to show: the whole fall, and only the beginning of a divergence."""
    lowest, start = min(min(losses), min(smoothed)), max(losses[: max(1, len(losses) // 10)])
    fall = max(start - lowest, 1e-12, 1e-3 * abs(start))
    highest = min(max(losses), start + 0.35 * fall)
    room = 0.06 * max(highest - lowest, fall)
    return lowest - 2 * room, highest + room
