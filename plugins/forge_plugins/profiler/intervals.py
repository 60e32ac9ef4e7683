"""Times in a trace: its events, and sorted, disjoint lists of intervals (start, end)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]


@dataclass(slots=True)
class Span:
    """One event of the trace."""

    name: str
    kind: str
    start: float
    end: float
    thread: tuple[Any, Any]
    id: int = 0
    "The number of an operator; of a kernel or a wait, that of the operator it belongs to."
    correlation: int = 0
    parent: Span | None = None
    own: float = 0.0
    bytes: int = 0
    total: int = 0
    device: tuple[int, int] = (0, 0)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def minus(intervals: list[Interval], holes: list[Interval]) -> list[Interval]:
    """Return `intervals` without `holes`."""
    left: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        at = first
        while at < len(holes) and holes[at][0] < end:
            if holes[at][0] > start:
                left.append((start, holes[at][0]))
            start = max(start, holes[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: list[Interval]) -> float:
    """Return the total length."""
    return sum(end - start for start, end in intervals)


def covers(intervals: list[Interval], moment: float) -> bool:
    """Whether a moment is in one of the intervals."""
    at = bisect_right(intervals, (moment, float("inf"))) - 1
    return at >= 0 and moment < intervals[at][1]


def times_of(spans: Iterable[Span]) -> list[Interval]:
    """Return when at least one of these events ran."""
    return union((span.start, span.end) for span in spans)
