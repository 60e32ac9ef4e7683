"""Stretches of time: lists of (start, end), in order and apart from each other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that any of them covers."""
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
    """The time that is in `intervals` and not in `holes`."""
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
    """How long they are together."""
    return sum(end - start for start, end in intervals)


def covers(intervals: list[Interval], moment: float) -> bool:
    """Whether a moment is in one of them."""
    at = bisect_right(intervals, (moment, float("inf"))) - 1
    return at >= 0 and moment < intervals[at][1]
