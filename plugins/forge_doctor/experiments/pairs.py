"""Pairs: read a sample again and again: where its picture is turned, its target must be turned with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient
from forge_doctor.stored import Sample, count_of, read

TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "flipped left to right": lambda x: x.flip(-1),
    "flipped upside down": lambda x: x.flip(-2),
    "turned by half": lambda x: x.flip(-1, -2),
    "turned by a quarter": lambda x: x.rot90(1, (-2, -1)),
    "turned by three quarters": lambda x: x.rot90(3, (-2, -1)),
}
READS, SAMPLES = 8, 10


def follow(patient: Patient) -> Iterator[Finding]:
    """A picture that is turned from one reading to the next, with a map of the same size that is not."""
    total = count_of(patient.train)
    broken: list[str] = []
    still: list[str] = []
    for i in range(0, total, max(1, total // SAMPLES)):
        served = [read(patient.train, i, SEED + k) for k in range(READS)]
        for other in served[1:]:
            for what, kind in _judged(served[0], other):
                (broken if kind == "map" else still).append(what)
    if len(broken) >= 3:
        yield Finding(
            "pairs_broken",
            f"A picture that is {broken[0]} when it is read again keeps its target as it was: input and target no "
            f"longer belong together (in {len(broken)} readings).",
            "train",
            {"readings": len(broken)},
            cure="Draw once, and apply the same turn to the input and to its target.",
        )
    elif len(still) >= 3:
        yield Finding(
            "pairs_broken",
            f"A picture that is {still[0]} when it is read again keeps its numbers, which may be places in it: "
            "boxes, points and directions must be turned with the picture.",
            "train",
            {"readings": len(still)},
            level="note",
        )


def _judged(one: Sample, other: Sample) -> Iterator[tuple[str, str]]:
    """The turns of pictures that targets did not follow."""
    pictures = [p for p, x in enumerate(one) if x.ndim >= 2 and min(x.shape[-2:]) >= 6 and x.is_floating_point()]
    for p in pictures:
        turn = _turn(one[p].float(), other[p].float()) if len(other) > p and one[p].shape == other[p].shape else ""
        if not turn:
            continue
        for q, y in enumerate(one):
            if q == p or len(other) <= q or y.shape != other[q].shape or not torch.equal(y, other[q]):
                continue
            if y.ndim >= 2 and y.shape[-2:] == one[p].shape[-2:]:
                if not torch.equal(TURNS[turn](y), y):
                    yield turn, "map"
            elif y.is_floating_point() and y.ndim and y.shape[-1] in (2, 4) and bool((y != y.flatten()[0]).any()):
                yield turn, "numbers"


def _turn(x: Tensor, y: Tensor) -> str:
    """The turn that makes one reading of a picture much like another; "" where it is not turned."""
    plain = _alike(x, y)
    found = {name: _alike(turn(x), y) for name, turn in TURNS.items() if turn(x).shape == y.shape}
    best = max(found, key=lambda name: found[name], default="")
    return best if best and found[best] > max(0.8, plain + 0.2) else ""


def _alike(x: Tensor, y: Tensor) -> float:
    both = torch.stack([x.flatten(), y.flatten()])
    return float(torch.corrcoef(both)[0, 1]) if bool((both.std(1) > 1e-9).all()) else 1.0


def fixed(patient: Patient) -> Iterator[Finding]:
    """Samples of val that are others when they are read again."""
    loader = patient.loaders["val"]
    total = count_of(loader) if loader is not None else 0
    changed = []
    for i in range(0, total, max(1, total // SAMPLES)):
        one, other = read(loader, i, SEED), read(loader, i, SEED + 1)
        if len(one) == len(other) and any(
            x.shape != y.shape or not torch.equal(x, y) for x, y in zip(one, other, strict=True)
        ):
            changed.append(i)
    if len(changed) >= 2:
        yield Finding(
            "random_validation_data",
            f"Samples of val are others each time they are read ({len(changed)} of {SAMPLES} that were read twice): "
            "validations of the same weights differ.",
            "val",
            {"samples": changed[:8]},
        )
