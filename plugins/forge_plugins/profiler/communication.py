"""The time of collectives in a trace, and how much of it is exposed: nothing is computed meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Event = Mapping[str, Any]

COLLECTIVE = re.compile(r"nccl\w*Kernel_(?P<kernel>[A-Za-z]+)|gloo:(?P<gloo>\w+)")
"""NCCL's kernels, and gloo's own work on its threads."""
WAITS = re.compile(r"autograd::|torch::|_?c10d|record_param_comms|nccl:")
"""Operators of the host in which a thread may only wait for others."""


def collectives(events: Iterable[Event], updates: int) -> list[dict[str, Any]]:
    """Return rows for the collectives of a trace by kind, the most exposed first, and last for all together.

    On a device computing is every other kernel, on a CPU the operators of all threads.
    """
    kinds: dict[str, list[Event]] = {}
    kernels, operators = list[Event](), list[Event]()
    for event in events:
        name, category = event.get("name", ""), event.get("cat")
        if event.get("ph") != "X" or category not in ("kernel", "cpu_op", "user_annotation"):
            continue
        if found := COLLECTIVE.match(name):
            kinds.setdefault(_kind(found), []).append(event)
        elif category == "kernel":
            kernels.append(event)
        elif category == "cpu_op" and "::" in name and not WAITS.match(name):
            operators.append(event)
    computing = kernels or operators

    def of(name: str, found: list[Event]) -> dict[str, Any]:
        time, exposed = _seconds(found), _seconds([*found, *computing]) - _seconds(computing)
        totals = {"calls": len(found), "time": time, "exposed": exposed, "overlapped": time - exposed}
        return {"name": name, **{key: total / updates for key, total in totals.items()}}

    by_kind = sorted((of(*each) for each in kinds.items()), key=lambda row: (row["exposed"], row["time"]), reverse=True)
    return [*by_kind, of("all", [event for found in kinds.values() for event in found])] if kinds else []


def _kind(found: re.Match[str]) -> str:
    """Return torch's name of a collective: AllReduce, in a kernel of NCCL's, is all_reduce."""
    return found["gloo"] or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found["kernel"]).lower()


def _seconds(events: Iterable[Event]) -> float:
    """Return the time in which at least one of these events ran."""
    total, until = 0.0, float("-inf")
    for start, micros in sorted((event["ts"], event["dur"]) for event in events):
        total += max(0.0, start + micros - max(start, until))
        until = max(until, start + micros)
    return total / 1e6
