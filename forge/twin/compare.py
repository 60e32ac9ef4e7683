"""Where two records part: the first difference, with its path, its update and its size."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from forge.twin.record import NOT_KEPT, Mark, Record, numbers, parts, seal
from forge.util.digest import digest, form, in_a_row
from forge.util.text import few

ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""What results may differ by that are computed in another order, relative to the largest entry, by their dtype."""
Key = tuple[int | None, str, str, int]
"""Update, kind and path of a mark, and how many of these came before it."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a value is from the one that it should be."""

    text: str
    relative: float = math.inf
    "The largest difference as a share of the largest entry, or about that of the norms where no value was kept."
    absolute: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two programs part."""

    update: int | None
    path: str
    distance: Distance
    kind: str = ""
    aside: bool = False
    "Whether only values differ that may differ alone: nothing else has shown it yet."
    names: tuple[str, ...] = ()
    "The paths of all of this kind that differ in this update."

    def __str__(self) -> str:
        when = (
            "" if self.update is None else f"at update {self.update}, " if self.update else "before the first update, "
        )
        what = f"{self.kind} ({few(self.names or [self.path])})" if self.kind else self.path or "the value"
        return f"{when}in {what}{f': {self.distance.text}' if self.distance.text else ''}"


def assert_same(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Raise an AssertionError that names the first difference of two records, modules, or nested values of tensors."""
    found = first_difference(actual, expected, tolerance)
    assert found is None, f"They differ {found}."


def first_difference(
    actual: Any, expected: Any, tolerance: float = 0.0, noise: Iterable[Difference] = ()
) -> Difference | None:
    """Return where two records, modules or nested values part; None if they are the same.

    A tolerance of 0 asks for the same bits (NaN equals NaN, 0.0 is not -0.0). Any other is relative to the largest
    entry of a value, or to its norm where a record kept no values; whole numbers and texts must be equal all the same.
    A value far smaller than others of its kind in the update is noise (the gradient of a bias before a BatchNorm): it
    is compared with `tolerance` of the largest. What a record has aside is the answer if something after it in the same
    update differs too, or if nothing else differs. `noise` are differences of two that should be the same, such as
    times: what they name is not compared.
    """
    odd = {(each.kind, each.path) for each in noise}
    apart = differences(marks_of(actual), marks_of(expected), tolerance)
    apart = (each for each in apart if (each.kind, each.path) not in odd)
    found = [each for each in apart if not tolerance or not each.distance.relative <= tolerance]
    first = next((each for each in found if not each.aside), found[0] if found else None)
    if first is None:
        return None
    at = found.index(first)
    before = [each for each in found[:at] if each.aside and each.update == first.update]
    cause = replace(before[0], aside=first.aside) if before else first
    names = dict.fromkeys(each.path for each in found if (each.update, each.kind) == (cause.update, cause.kind))
    return replace(cause, names=tuple(names))


def differences(actual: Iterable[Mark], expected: Iterable[Mark], tolerance: float = 0.0) -> Iterator[Difference]:
    """Yield every mark that is not the same bit for bit, in order. What is aside counts where both have it.

    The relative distance of what is noise, by the tolerance, is that from noise.
    """
    ours, theirs = _by_key(actual), _by_key(expected)
    largest: dict[tuple[int | None, str], float] = {}
    for mark in theirs.values() if tolerance else ():
        largest[mark.update, mark.kind] = max(_size(mark), largest.get((mark.update, mark.kind), 0.0))
    for our, their in zip_longest(ours, theirs):
        if our is not None and our not in theirs and not ours[our].aside:
            yield _difference(ours[our], _alone("first", ours[our]))
        if their is None:
            continue
        mark, right = ours.get(their), theirs[their]
        distance = _alone("second", right) if mark is None else _distance(mark, right)
        if distance is None or (mark is None and right.aside):
            continue
        noise = tolerance * largest.get((right.update, right.kind), 0.0) if right.kind else 0.0
        if noise and distance.absolute is not None:
            distance = replace(distance, relative=min(distance.relative, distance.absolute / noise))
        yield _difference(right, distance)


def marks_of(value: Any) -> list[Mark]:
    """Return the marks of a record; of a module or a nested value, one that holds each part."""
    if isinstance(value, Record):
        return value.marks
    return [Mark(None, path, "", [], value=part) for path, part in parts(value)]


def tensor_difference(a: Tensor, b: Tensor) -> Distance | None:
    """Return how far a tensor is from another; None if they are equal bit for bit."""
    if form(a) != form(b):
        return Distance(f"{form(a)} against {form(b)}")
    a, b = (in_a_row(tensor).cpu() for tensor in (a, b))
    bits = [row.view(torch.uint8).view(-1, row.element_size()) for row in (a, b)]
    unequal = int((bits[0] != bits[1]).any(1).sum())
    if not unequal:
        return None
    said = f"{unequal} of {a.numel()} entries"
    if not (a.is_floating_point() or a.is_complex()):  # a distance between integers means nothing
        return Distance(said)
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=math.inf)
    absolute, size = float(gap.max()), float(b.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return Distance(f"{said}, by up to {absolute:.3g}", _share(absolute, size), absolute)


def _distance(a: Mark, b: Mark) -> Distance | None:
    if a.value is not NOT_KEPT and b.value is not NOT_KEPT:
        return _value_difference(a.value, b.value)
    a, b = _sealed(a), _sealed(b)
    if a.digest == b.digest:
        return None
    forms = [mark.digest.rpartition(" ")[0] for mark in (a, b)]
    if forms[0] != forms[1]:
        return Distance(" against ".join(each or "no tensor" for each in forms))
    if not a.sketch or len(a.sketch) != len(b.sketch):
        return Distance("")
    if isinstance(a.sketch[0], int) or re.match("u?int|bool", forms[0]):  # no rounding excuses it
        return Distance(f"{a.sketch[0]!r} against {b.sketch[0]!r}" if len(a.sketch) == 1 else "")
    absolute = math.dist(a.sketch, b.sketch)
    share = _share(absolute, max(math.hypot(*a.sketch), math.hypot(*b.sketch)))
    if len(a.sketch) == 1:
        return Distance(f"{a.sketch[0]!r} against {b.sketch[0]!r}", share, absolute)
    return Distance(f"by about {share:.1g} of its norm" if share else "in bits that do not change it", share, absolute)


def _alone(which: str, mark: Mark) -> Distance:
    kept = "" if mark.value is NOT_KEPT else f", {_short(mark.value)}"
    return Distance(f"only the {which} has it{kept}")


def _sealed(mark: Mark) -> Mark:
    """Return a mark with its digest, where it has a value in the place of one."""
    value = mark.value
    return mark if value is NOT_KEPT else replace(mark, digest=seal(value), sketch=numbers(value))


def _value_difference(a: Any, b: Any) -> Distance | None:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return tensor_difference(a, b)
    if type(a) is type(b) and (a is b or digest(a) == digest(b)):
        return None
    said = f"{_short(a)} instead of {_short(b)}"
    if isinstance(a, float) and isinstance(b, float):
        return Distance(said, _share(abs(a - b), max(abs(a), abs(b))), abs(a - b))
    return Distance(said)


def _size(mark: Mark) -> float:
    value = mark.value if isinstance(mark.value, Tensor) else torch.tensor(mark.sketch)
    finite = value.detach().double().abs().nan_to_num(0.0, 0.0, 0.0)
    return float((finite.max() if value is mark.value else finite.norm()) if finite.numel() else 0.0)


def _share(absolute: float, size: float) -> float:
    if math.isnan(absolute):
        return math.inf
    return absolute / size if size else math.inf if absolute else 0.0


def _short(value: Any) -> str:
    return f"a tensor of {form(value)}" if isinstance(value, Tensor) else repr(value)


def _difference(mark: Mark, distance: Distance) -> Difference:
    return Difference(mark.update, mark.path, distance, mark.kind, mark.aside)


def _by_key(marks: Iterable[Mark]) -> dict[Key, Mark]:
    found: dict[Key, Mark] = {}
    times: Counter[tuple[int | None, str, str]] = Counter()
    for mark in marks:
        name = mark.update, mark.kind, mark.path
        found[*name, times[name]] = mark
        times[name] += 1
    return found
