"""Boxes: rectangular pieces of a tensor, how they are named in a file, and whether together they are the whole."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from forge.errors import CheckpointError

MAX_CUT_DIMENSIONS = 4
"""A mesh cuts a tensor along as many dimensions as it has itself; every one more doubles the work of a check."""

_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_PIECE = re.compile(rf"(?P<name>.+)@(?P<begin>{_NUMBER}(?:,{_NUMBER})*)", re.DOTALL)


class Box(NamedTuple):
    """Where a piece begins, and how large it is, in every dimension."""

    begin: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.begin, self.size, strict=True))

    def within(self, other: Box) -> Box:
        """The same place, counted from where another box begins."""
        return Box(tuple(a - b for a, b in zip(self.begin, other.begin, strict=True)), self.size)


def whole(shape: Iterable[int]) -> Box:
    """The box that is all of a tensor."""
    size = tuple(shape)
    return Box((0,) * len(size), size)


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common, if anything."""
    begin = tuple(map(max, one.begin, other.begin))
    ends = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    size = tuple(end - first for first, end in zip(begin, ends, strict=True))
    return Box(begin, size) if min(size, default=1) > 0 else None


def cover(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether every entry of a tensor is in exactly one box.

    A box is known by its corners, each with a sign: in a sum of boxes all corners cancel out but those of what is
    really covered. So this is exact, and takes no longer than there are corners.
    """
    boxes = list(boxes)
    if any(
        len(box.begin) != len(shape) or len(box.size) != len(shape) or min(box.size, default=1) < 1 for box in boxes
    ):
        return False
    cut = [d for d, size in enumerate(shape) if any(box.begin[d] or box.size[d] != size for box in boxes)]
    if len(cut) > MAX_CUT_DIMENSIONS:
        raise CheckpointError(f"a tensor is cut along {len(cut)} dimensions; {MAX_CUT_DIMENSIONS} are the limit.")
    corners: Counter[tuple[int, ...]] = Counter()
    for box, weight in [*((box, 1) for box in boxes), (whole(shape), -1)]:
        ends = [((box.begin[d], 1), (box.begin[d] + box.size[d], -1)) for d in cut]
        for corner in itertools.product(*ends):
            corners[tuple(place for place, _ in corner)] += weight * math.prod(sign for _, sign in corner)
    return not any(corners.values())


def piece_name(name: str, box: Box) -> str:
    """What a piece is called in its file: the tensor's name, and where the piece begins."""
    return f"{name}@{','.join(map(str, box.begin))}"


def parse_piece_name(text: str) -> tuple[str, tuple[int, ...]] | None:
    """The two parts of such a name; None for the name of a whole tensor."""
    match = _PIECE.fullmatch(text)
    return (match["name"], tuple(map(int, match["begin"].split(",")))) if match else None
