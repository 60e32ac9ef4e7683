"""Pairs: read a sample again and again: where its picture is turned, its target must follow."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from forge_doctor.experiments.reading import places as sides
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient, tensors
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
NEAR, APART = 0.3, 0.8
"""Readings of an input that are nearly the same, as a share of how far they usually are apart; and how far apart their
targets then are, at least, that do not follow."""
MAPS = 40
"""Samples of each split whose maps are turned."""
FEWEST = 12
"""Pairs of readings that are nearly the same."""


def together(patient: Patient) -> Iterator[Finding]:
    """Where both an input and its target vary from reading to reading, readings that are alike in one are in both."""
    total, (asked, told), parts = count_of(patient.train), sides(patient), len(tensors(patient.batches[0]))
    served = []
    for i in range(0, total, max(1, total // SAMPLES)) if asked and told else ():
        served.append([read(patient.train, i, SEED + READS * i + k) for k in range(READS)])
    served = [reads for reads in served if all(len(one) == parts for one in reads)]
    for p, q in itertools.product(sorted(asked), sorted(told)) if len(served) > 2 else ():
        x, y = ([_distances([one[place] for one in reads]) for reads in served] for place in (p, q))
        usual = _distances([reads[0][q] for reads in served])
        near, far, same = [], [], 0
        for a, b in zip(x, y, strict=True):
            is_near = a < NEAR * a.mean()
            near.append(b[is_near])
            far.append(b[~is_near])
            same += int((b[a < 1e-4 * a.mean()] > 0).sum())
        close, rest = torch.cat(near), torch.cat(far)
        spread = float(rest.mean()) if len(rest) else 0.0
        if min(len(close), len(rest)) < FEWEST or spread < NEAR * float(usual.mean()):
            continue
        if float(close.mean()) > APART * spread and sum(bool((b > 0).any()) for b in near) >= 3:
            text = (
                f"When a training sample is read again, tensor {p} and its target, tensor {q}, vary apart: readings in "
                f"which one is nearly the same differ in the other by {float(close.mean()) / spread:.0%} of what any "
                f"two do ({len(close)} pairs of readings)."
            )
            evidence = {"pairs": len(close), "the same input with another target": same}
            yield Finding("pairs_broken", text, "train", evidence, level="error" if same >= 3 else "warning")
            return


def _distances(given: list[Tensor]) -> Tensor:
    """How far each two of some tensors are apart, whatever their brightness and contrast."""
    whole = not given[0].is_floating_point()
    if len({x.shape for x in given}) > 1 or given[0].is_complex():
        return torch.tensor(
            [float(a.shape != b.shape or not torch.equal(a, b)) for a, b in itertools.combinations(given, 2)]
        )
    x = torch.stack([x.flatten() for x in given]).double()
    if whole:
        return torch.stack([(a != b).double().mean() for a, b in itertools.combinations(x, 2)])
    if x.shape[1] >= 16:
        x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True).clamp_min(1e-9)
    return torch.pdist(x) / max(1, x.shape[1]) ** 0.5


AGREES, SEEN = 0.8, 0.6
"""The share of samples of val whose map agrees best with their picture as it is, and that of train, if it follows."""


def maps(patient: Patient) -> Iterator[Finding]:
    """Turn the maps of samples: none may agree better with its picture than the one that it has."""
    asked, told = sides(patient)
    for p, q in itertools.product(sorted(asked), sorted(told)):
        shares = []
        for loader in patient.loaders.values():
            total = count_of(loader) if loader is not None else 0
            served = [read(loader, i, SEED + i) for i in range(0, total, max(1, total // MAPS))]
            best = [_agrees_best(one[p], one[q]) for one in served if len(one) > max(p, q)]
            shares.append([is_best for is_best in best if is_best is not None])
        train, val = shares
        if min(len(train), len(val)) < FEWEST or sum(val) < AGREES * len(val) or sum(train) > SEEN * len(train):
            continue
        text = (
            f"In {1 - sum(train) / len(train):.0%} of the samples of train, tensor {q} agrees better with the picture, "
            f"tensor {p}, when it is turned or mirrored, and in {1 - sum(val) / len(val):.0%} of those of val: the "
            "picture and its map are not turned together."
        )
        yield Finding("pairs_broken", text, "train", {"train": sum(train), "of": len(train)}, level="warning")
        return


def _agrees_best(x: Tensor, y: Tensor) -> bool | None:
    """Whether a map says more of the picture as it is than turned; None where it says nothing, or is no map."""
    if x.ndim < 2 or y.ndim < 2 or x.shape[-2:] != y.shape[-2:] or min(x.shape[-2:]) < 6 or y.is_floating_point():
        return None
    own, turned = _told_by(x, y), [_told_by(x, turn(y)) for turn in TURNS.values() if turn(y).shape == y.shape]
    return None if max(own, *turned) < 0.05 else own >= max(turned)


def _told_by(x: Tensor, y: Tensor) -> float:
    """The share of the variance of a picture that its classes explain."""
    pixels = x.double().reshape(-1, *x.shape[-2:]).mean(0).flatten()
    kinds, group = y.reshape(-1, *y.shape[-2:])[0].flatten().unique(return_inverse=True)
    zeros = torch.zeros(len(kinds), dtype=torch.float64)
    count = zeros.index_add(0, group, torch.ones_like(pixels))
    mean = zeros.index_add(0, group, pixels - pixels.mean()) / count
    return float((count * mean**2).sum() / ((pixels - pixels.mean()) ** 2).sum().clamp_min(1e-12))


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
