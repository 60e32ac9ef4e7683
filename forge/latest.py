"""Which metrics are still logged, once a run has been continued."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

EVALUATIONS = ("val", "test")


def still_logged(latest: Mapping[str, Any], logged: Collection[str]) -> dict[str, Any]:
    """The metrics without those that nobody logs any more.

    A run must go on with all of them, to end as one that was never cut off; what is written down of it need not. A name
    that this life has not logged is gone if others of its kind have been: a plugin that logged it was taken out, say.
    Where no validation came yet, the last one of an earlier life is still the latest there is.
    """
    seen = {kind_of(name) for name in logged}
    return {name: value for name, value in latest.items() if name in logged or kind_of(name) not in seen}


def kind_of(name: str) -> str:
    """By which log a metric comes: val, test, or train for all that comes along with the updates."""
    head = name.partition("/")[0]
    return head if head in EVALUATIONS else "train"
