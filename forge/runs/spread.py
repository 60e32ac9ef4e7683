"""Spread: a metric over several runs, as one number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


class Spread(float):
    """The mean of a metric over runs: a number, which also knows how far the runs are apart."""

    values: tuple[float, ...]
    std: float
    "The sample standard deviation; NaN of one run."
    worst: tuple[str, float] | None
    "The run with the worst value, and the value; None where it is not known which is better."

    def __new__(cls, by_run: Mapping[str, float], mode: str | None = None) -> Spread:
        from statistics import fmean, stdev  # with decimal numbers and fractions: not at the start of every run

        values = tuple(by_run.values())
        found = super().__new__(cls, fmean(values))
        found.values = values
        found.std = stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
        better = {"min": 1.0, "max": -1.0}.get(mode or "")
        lost = [(run, value) for run, value in by_run.items() if not math.isfinite(value)]
        found.worst = None
        if better is not None:
            found.worst = lost[0] if lost else max(by_run.items(), key=lambda item: better * item[1])
        return found

    @property
    def n(self) -> int:
        return len(self.values)


Point = tuple[float, float]


def mean_curve(curves: Sequence[Sequence[Point]]) -> tuple[list[Point], list[tuple[float, float, float]]]:
    """Return the mean of curves, and the band (x, low, high) of one standard deviation around it.

    Where runs logged at different updates, as folds of different sizes do, a run is read between its points. A curve
    begins where the last of them begins, and ends where the first of them ends.
    """
    known = [sorted(dict(curve).items()) for curve in curves if curve]
    if not known:
        return [], []
    first, last = max(curve[0][0] for curve in known), min(curve[-1][0] for curve in known)
    places = sorted({x for curve in known for x, _ in curve if first <= x <= last})
    columns = zip(*(_read_at(curve, places) for curve in known), strict=True)
    spreads = [(x, Spread(dict(enumerate(values)))) for x, values in zip(places, columns, strict=True)]  # pyright: ignore[reportArgumentType]
    band = [(x, float(at) - at.std, float(at) + at.std) for x, at in spreads if math.isfinite(at.std)]
    return [(x, float(at)) for x, at in spreads], band


def _read_at(curve: Sequence[Point], places: Sequence[float]) -> list[float]:
    """Return the values of a curve at places within it, in order."""
    found, right = [], 0
    for x in places:
        while curve[right][0] < x:
            right += 1
        at, value = curve[right]
        if at != x:
            before, earlier = curve[right - 1]
            value = earlier + (value - earlier) * (x - before) / (at - before)
        found.append(value)
    return found
