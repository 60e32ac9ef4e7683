"""What differs between two checkpoints, for `forge ckpt diff`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def compare(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two trees bit for bit: every value that differs, and a summary of the tensors of each part."""
    ours, theirs = dict(flat(then)), dict(flat(now))
    values: list[tuple[str, Any, Any]] = []
    parts: dict[str, dict[str, Any]] = {}
    tensors = 0
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        a, b = ours.get(name, ABSENT), theirs.get(name, ABSENT)
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            if type(a) is not type(b) or repr(a) != repr(b):  # NaN equals NaN, and 0.0 is not -0.0
                values.append((name, a, b))
            continue
        tensors += 1
        part, _, rest = name.partition(".")
        row = parts.setdefault(part, {"part": part, "differ": 0, "of": 0, "largest": None, "first": ""})
        row["of"] += 1
        how, distance = _tensor_difference(a, b)
        if how is not None:
            row["first"] = row["first"] or (rest or name) + how
            row["differ"] += 1
            if distance is not None:
                row["largest"] = max(distance, row["largest"] or 0.0)
    differing = [row for row in parts.values() if row["differ"]]
    return {
        "values": values,
        "tensors": differing,
        "compared": {"values": len(ours.keys() | theirs.keys()) - tensors, "tensors": tensors},
    }


class _Absent:
    """A value that only the other checkpoint has."""

    def __repr__(self) -> str:
        return "–"


ABSENT = _Absent()


def _tensor_difference(a: Any, b: Any) -> tuple[str | None, float | None]:
    """Return (how they differ, the largest distance); the first is None for tensors that are equal bit for bit."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return f" (only in {'A' if isinstance(a, Tensor) else 'B'})", None
    if a.shape != b.shape or a.dtype != b.dtype:
        described = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (a, b)]
        return f" ({described[0]} against {described[1]})", None
    if torch.equal(*(t.contiguous().reshape(-1, 1).view(torch.uint8) for t in (a, b))):
        return None, None
    if not (a.is_floating_point() or a.is_complex()):
        return "", None  # a distance between integers means nothing
    wide = torch.complex128 if a.is_complex() else torch.float64
    return "", torch.nan_to_num((a.to(wide) - b.to(wide)).abs(), nan=float("inf")).max().item()


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, leaf) of nested mappings and lists; an empty one is a leaf."""
    if not isinstance(value, (Mapping, list, tuple)) or not value:
        yield path, value
        return
    for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from flat(inner, f"{path}.{key}" if path and key != "" else path or str(key))
