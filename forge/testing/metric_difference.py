"""Metrics that can be compared: what two equal fits do not agree on, a clock has measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Metrics = Mapping[str, Any]


def metric_difference(actual: Metrics, expected: Metrics, known: Metrics, again: Callable[[], Metrics]) -> str | None:
    """The first metric of `known` that differs, in words, or None; `again` repeats the fit that `known` comes from."""
    apart = [name for name in known if not same(actual.get(name), expected.get(name))]
    repeated = again() if apart else {}
    for name in apart:
        if name in repeated and same(repeated[name], known[name]):
            return f"the metric {name!r} is {actual.get(name)!r} instead of {expected.get(name)!r}."
    return None


def same(one: Any, other: Any) -> bool:
    """Whether two values of a metric are equal; NaN equals NaN."""
    return one == other or (one != one and other != other)
