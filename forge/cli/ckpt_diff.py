"""What differs between two checkpoints, for `forge ckpt diff`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from forge.twin.compare import differences, marks_of


def compare(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two trees bit for bit: every value that differs, and a summary of the tensors of each part."""
    ours, theirs = ({mark.path: mark.value for mark in marks_of(tree)} for tree in (then, now))
    names = {**ours, **theirs}
    tensors = {name for name in names if isinstance(ours.get(name), Tensor) or isinstance(theirs.get(name), Tensor)}
    parts: dict[str, dict[str, Any]] = {}
    for name in filter(tensors.__contains__, names):
        part = name.partition(".")[0]
        parts.setdefault(part, {"part": part, "differ": 0, "of": 0, "largest": None, "first": ""})["of"] += 1
    found = {each.path: each.distance for each in differences(marks_of(then), marks_of(now))}
    for name in (name for name in names if name in found and name in tensors):
        part, _, rest = name.partition(".")
        row, distance = parts[part], found[name]
        row["first"] = row["first"] or f"{rest or name} ({distance.text})"
        row["differ"] += 1
        if distance.absolute is not None:
            row["largest"] = max(distance.absolute, row["largest"] or 0.0)
    left = [name for name in names if name in found and name not in tensors]
    return {
        "values": [(name, ours.get(name, ABSENT), theirs.get(name, ABSENT)) for name in left],
        "tensors": [row for row in parts.values() if row["differ"]],
        "compared": {"values": len(names) - len(tensors), "tensors": len(tensors)},
    }


class _Absent:
    """A value that only the other checkpoint has."""

    def __repr__(self) -> str:
        return "–"


ABSENT = _Absent()
