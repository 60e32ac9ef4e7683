"""Pairs: read a sample again and again: where its picture is turned, its target must follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient
from forge_doctor.probes.data import stacked
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
    """A picture that is turned from one reading to the next, with a map, places or a class that are not."""
    total = count_of(patient.train)
    kept: dict[str, list[tuple[int, str]]] = {"map": [], "numbers": [], "class": []}
    for i in range(0, total, max(1, total // SAMPLES)):
        served = [read(patient.train, i, SEED + k) for k in range(READS)]
        for other in served[1:]:
            for place, turn, kind in _judged(served[0], other, patient.label_position):
                kept[kind].append((place, turn))
    if len(kept["map"]) >= 3:
        text = (
            f"A picture that is {kept['map'][0][1]} when it is read again keeps its target as it was: input and "
            f"target no longer belong together (in {len(kept['map'])} readings)."
        )
        yield Finding("pairs_broken", text, "train", {"readings": len(kept["map"])})
    elif len(kept["numbers"]) >= 3:
        text = (
            f"A picture that is {kept['numbers'][0][1]} when it is read again keeps its numbers, which may be places "
            "in it: boxes, points and directions must be turned with the picture."
        )
        yield Finding("pairs_broken", text, "train", {"readings": len(kept["numbers"])}, level="note")
    for (place, turn), seen in Counter(kept["class"]).items():
        pair = _exchanged(patient, place, TURNS[turn]) if seen >= 3 else None
        if pair is not None:
            text = (
                f"Training pictures are {turn} at random and keep their labels, but in val a picture of class "
                f"{pair[0]} that is {turn} is nearest to class {pair[1]}, and the reverse."
            )
            yield Finding("augmentation_changes_label", text, "train", {"classes": list(pair), "turn": turn})
            return


def _judged(one: Sample, other: Sample, label: int | None) -> Iterator[tuple[int, str, str]]:
    """The places of pictures, their turns, and what did not follow them."""
    pictures = [p for p, x in enumerate(one) if x.ndim >= 2 and min(x.shape[-2:]) >= 6 and x.is_floating_point()]
    for p in pictures:
        turn = _turn(one[p].float(), other[p].float()) if len(other) > p and one[p].shape == other[p].shape else ""
        if not turn:
            continue
        for q, y in enumerate(one):
            if q == p or len(other) <= q or y.shape != other[q].shape or not torch.equal(y, other[q]):
                continue
            if q == label:
                yield p, turn, "class"
            elif y.ndim >= 2 and _is_to_scale(y, one[p]):
                if not torch.equal(TURNS[turn](y), y):
                    yield p, turn, "map"
            elif y.is_floating_point() and y.ndim and y.shape[-1] in (2, 4) and bool((y != y.flatten()[0]).any()):
                yield p, turn, "numbers"


def _is_to_scale(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are maps of one size, or of one times as many rows and columns."""
    (a, b), (c, d) = x.shape[-2:], y.shape[-2:]
    return a * d == b * c and min(a, b) >= 6 and max(a, c) % min(a, c) == 0


def _exchanged(patient: Patient, place: int, turn: Callable[[Tensor], Tensor]) -> tuple[int, int] | None:
    """Two classes of val that a turn makes out of each other, by nearest neighbours among the other samples."""
    labels, val = patient.labels_of(patient.val_samples), stacked(patient, patient.val_samples).get(place)
    if labels is None or val is None or len(val) < 40:
        return None
    x, labels = val[:1000].float(), labels[:1000]
    itself = torch.eye(len(x)).bool()
    own, after = (
        labels[torch.cdist(z.flatten(1), x.flatten(1)).masked_fill(itself, torch.inf).argmin(1)] for z in (x, turn(x))
    )
    goes: dict[int, int] = {}
    for label in labels.unique().tolist():
        mine = labels == label
        other = int(after[mine].mode().values)
        sure = int(mine.sum()) >= 8 and float((own[mine] == label).float().mean()) >= 0.8
        if sure and other != label and float((after[mine] == other).float().mean()) >= 0.8:
            goes[label] = other
    return next(((a, b) for a, b in goes.items() if goes.get(b) == a), None)


def _turn(x: Tensor, y: Tensor) -> str:
    """The turn that makes one reading of a picture much like another; "" where it is not turned."""
    plain = alike(x, y)
    found = {name: alike(turn(x), y) for name, turn in TURNS.items() if turn(x).shape == y.shape}
    best = max(found, key=lambda name: found[name], default="")
    return best if best and found[best] > max(0.8, plain + 0.2) else ""


def alike(x: Tensor, y: Tensor) -> float:
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
            x.shape != y.shape or not bool(((x == y) | (x != x)).all()) for x, y in zip(one, other, strict=True)
        ):
            changed.append(i)
    if len(changed) >= 2:
        text = (
            f"Samples of val are others each time they are read ({len(changed)} of {SAMPLES} that were read twice): "
            "validations of the same weights differ."
        )
        yield Finding("random_validation_data", text, "val", {"samples": changed[:8]})
