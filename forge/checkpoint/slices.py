"""Rectangular slices of a tensor: their names in a file, and whether they cover the tensor exactly."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from forge.errors import CheckpointError

MAX_CUT_DIMENSIONS = 4
"""A mesh cuts a tensor along at most as many dimensions as it has; each doubles the cost of the check."""

_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_PIECE = re.compile(rf"(?P<name>.+)@(?P<begin>{_NUMBER}(?:,{_NUMBER})*)", re.DOTALL)


class TensorSlice(NamedTuple):
    """The offset and the size of a slice, in every dimension."""

    begin: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def as_index(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.begin, self.size, strict=True))

    def within(self, other: TensorSlice) -> TensorSlice:
        """Return this slice relative to the offset of another one."""
        return TensorSlice(tuple(a - b for a, b in zip(self.begin, other.begin, strict=True)), self.size)


def whole(shape: Iterable[int]) -> TensorSlice:
    """Return the slice of a whole tensor."""
    size = tuple(shape)
    return TensorSlice((0,) * len(size), size)


def overlap(one: TensorSlice, other: TensorSlice) -> TensorSlice | None:
    """Return the intersection of two slices, or None."""
    begin = tuple(map(max, one.begin, other.begin))
    ends = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    size = tuple(end - first for first, end in zip(begin, ends, strict=True))
    return TensorSlice(begin, size) if min(size, default=1) > 0 else None


def cover(shape: tuple[int, ...], parts: Iterable[TensorSlice]) -> bool:
    """Whether every entry of a tensor is in exactly one slice.

    A slice is determined by its corners, each with a sign; in a sum of slices only the corners of the covered region
    do not cancel. The check is exact, and linear in the number of corners.
    """
    parts = list(parts)
    if any(
        len(part.begin) != len(shape) or len(part.size) != len(shape) or min(part.size, default=1) < 1 for part in parts
    ):
        return False
    cut = [d for d, size in enumerate(shape) if any(part.begin[d] or part.size[d] != size for part in parts)]
    if len(cut) > MAX_CUT_DIMENSIONS:
        raise CheckpointError(f"a tensor is cut along {len(cut)} dimensions; the limit is {MAX_CUT_DIMENSIONS}.")
    corners: Counter[tuple[int, ...]] = Counter()
    for part, weight in [*((part, 1) for part in parts), (whole(shape), -1)]:
        ends = [((part.begin[d], 1), (part.begin[d] + part.size[d], -1)) for d in cut]
        for corner in itertools.product(*ends):
            corners[tuple(place for place, _ in corner)] += weight * math.prod(sign for _, sign in corner)
    return not any(corners.values())


def piece_name(name: str, part: TensorSlice) -> str:
    """Return the name of a piece in its file: the tensor's name and the offset."""
    return f"{name}@{','.join(map(str, part.begin))}"


def parse_piece_name(text: str) -> tuple[str, tuple[int, ...]] | None:
    """Split such a name into name and offset; None for the name of a whole tensor."""
    match = _PIECE.fullmatch(text)
    return (match["name"], tuple(map(int, match["begin"].split(",")))) if match else None
