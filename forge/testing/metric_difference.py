"""Comparison of metrics that two equal fits agree on; others, such as times, are skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Metrics = Mapping[str, Any]


def metric_difference(actual: Metrics, expected: Metrics, known: Metrics, again: Callable[[], Metrics]) -> str | None:
    """Describe the first metric of `known` that differs, or return None; `again` repeats the fit of `known`."""
    different = [name for name in known if not same(actual.get(name), expected.get(name))]
    repeated = again() if different else {}
    for name in different:
        if name in repeated and same(repeated[name], known[name]):
            return f"the metric {name!r} is {actual.get(name)!r} instead of {expected.get(name)!r}."
    return None


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; NaN equals NaN."""
    return one == other or (one != one and other != other)
