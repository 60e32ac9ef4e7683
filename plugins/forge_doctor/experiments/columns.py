"""Columns: each number of a sample over train beside val: it varies in both, and says the same of the target."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_doctor.deadline import Deadline
from forge_doctor.experiments.reading import places
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient
from forge_doctor.probes.data import stacked
from forge_doctor.stored import Sample, spread

MOST_SAMPLES, MOST_COLUMNS, MOST_TARGETS, FEWEST = 2000, 64, 8, 100
MOST_NUMBERS = 4096
"""Of a sample that is read again."""
SECONDS = 3.0
"""For reading samples of a split in their order."""
KINDS, BINS, FOLDS, BLOCKS = 64, 16, 5, 10
"""Different values of a column that are read as kinds, bins of others, folds of a fit, and blocks of its error."""
TELLS, LESS, FAR = 0.15, 0.65, 5.0
"""A correlation that is worth a look, the share of it that must be left in the other split, and how many errors it must
be away."""
NEVER = 1e-9
"""The chance at which a column that does not vary by luck is told."""


@dataclass
class Column:
    """One number of all samples of both splits."""

    place: int
    number: int
    train: Tensor
    val: Tensor

    @property
    def name(self) -> str:
        return f"number {self.number} of tensor {self.place}"


def samples(patient: Patient, split: str) -> list[Sample]:
    """Samples in the order of the dataset, where they are what the batches hold; else as they are served."""
    served = patient.samples if split == "train" else patient.val_samples
    shapes = [x.shape for x in served[0]] if served else []
    is_small = bool(served) and sum(x.numel() for x in served[0]) <= MOST_NUMBERS
    within = Deadline(SECONDS, time.process_time)
    found = spread(patient.loaders[split], MOST_SAMPLES, within) if is_small else []
    return found if found and all([x.shape for x in sample] == shapes for sample in found) else served


def _columns(patient: Patient, channels: bool = False) -> list[Column]:
    """The numbers of samples that have few of them; and whole channels of others, by their level and their spread."""
    train, val = (stacked(patient, samples(patient, split)) for split in ("train", "val"))
    found = []
    for place, x in train.items():
        y = val.get(place, x[:0])
        y = y if x.shape[1:] == y.shape[1:] else x[:0]
        if channels and x.ndim > 2 and x.is_floating_point():
            x, y = (z.float().flatten(2).mean(2) + z.float().flatten(2).std(2) for z in (x, y))
        if x.ndim <= 2 and x[0].numel() <= MOST_COLUMNS and not x.is_complex():
            one, other = (z.reshape(len(z), -1).double() for z in (x, y))
            found += [Column(place, i, one[:, i], other[:, i]) for i in range(one.shape[1])]
    return found


def agree(patient: Patient) -> Iterator[Finding]:
    """Predict the target by one column: what it says in train, it must say in val."""
    inputs, asked = places(patient)
    found = _columns(patient)
    renamed = next((told for column in found if (told := _renamed(column)) is not None), None)
    if renamed is not None:
        yield renamed
        return
    told = [c for c in found if c.place in asked][:MOST_TARGETS]
    if not told or min(len(told[0].train), len(told[0].val)) < FEWEST:
        return
    worst: tuple[float, Column, tuple[float, ...]] | None = None
    for column in found:
        if column.place not in inputs or len(column.train) < FEWEST or len(column.val) < FEWEST:
            continue
        for target in told:
            for y in _sides(target):
                far, said = _told(column, y)
                if far > (worst[0] if worst else FAR):
                    worst = far, column, said
    if worst is None:
        return
    far, column, (train, val, own_train, own_val) = worst
    by = f"By {column.name} of a sample the target is predicted with a correlation of"
    if own_train < LESS * own_val:
        text = f"{by} {own_val:.2f} in val, and of {train:.2f} in train: labels of train may belong to other samples."
    elif own_val >= LESS * own_train:
        text = (
            f"{by} {train:.2f} in train and {own_val:.2f} in val, but of {val:.2f} in val by what its values mean in "
            "train: they are encoded in another way there."
        )
    else:
        text = (
            f"{by} {train:.2f} in train, and of {val:.2f} in val: as if the sample's own target had been used to make "
            "it."
        )
    evidence = {"train": train, "val": val, "val by itself": own_val, "errors apart": far}
    yield Finding("splits_disagree", text, f"train and val, {column.name}", evidence)


def _renamed(column: Column) -> Finding | None:
    """A column of kinds that are as many and as frequent in val as in train, but under other names."""
    both = torch.cat([column.train, column.val])
    kinds = both.unique()
    few = min(len(column.train), len(column.val))
    if len(kinds) > KINDS or few < FEWEST or bool((both != both.round()).any()):
        return None
    shares = [(x[:, None] == kinds).double().mean(0) for x in (column.train, column.val)]
    apart, unnamed = (
        float((a - b).abs().sum()) / 2 for a, b in (shares, [x.sort(descending=True).values for x in shares])
    )
    luck = (len(kinds) / few) ** 0.5
    known = float(shares[1][shares[0] > 0].sum())
    if apart < 0.4 + luck or unnamed > 0.1 + luck / 2 or known < 0.5:
        return None
    text = (
        f"The values of {column.name} of a sample are as frequent in val as in train, but as other numbers: by their "
        f"names {apart:.0%} of the samples differ, and {unnamed:.0%} by how often each occurs. They are encoded in "
        "another way there."
    )
    evidence = {"by name": apart, "by frequency": unnamed}
    return Finding("splits_disagree", text, f"train and val, {column.name}", evidence)


def _sides(target: Column) -> Iterator[tuple[Tensor, Tensor]]:
    """A target as numbers to predict: itself, or each of its classes."""
    kinds, counts = target.train.unique(return_counts=True)
    whole = bool((target.train == target.train.round()).all())
    if not whole or len(kinds) == 2 or len(kinds) > 20:
        yield target.train, target.val
        return
    for kind in kinds[counts.argsort(descending=True)[:MOST_TARGETS]]:
        yield (target.train == kind).double(), (target.val == kind).double()


def _told(column: Column, y: tuple[Tensor, Tensor]) -> tuple[float, tuple[float, ...]]:
    """How many errors apart train and val are, and the correlations of both and of each by itself."""
    codes = _codes(column)
    own = [_correlation(*_predicted(code, side), side) for code, side in zip(codes, y, strict=True)]
    over = [_correlation(*_predicted(codes[1 - i], y[1 - i], codes[i], y[i]), y[i]) for i in (0, 1)]
    far = 0.0
    for (r, error), (other, its_error), less in ((own[0], over[1], LESS), (own[1], over[0], 0.5 * LESS)):
        if r > TELLS and other < less * r:
            far = max(far, (r - other) / (error**2 + its_error**2) ** 0.5)
    return far, (own[0][0], over[1][0], own[0][0], own[1][0])


def _codes(column: Column) -> tuple[Tensor, Tensor]:
    """The kinds, or bins, of a column in both splits."""
    both = torch.cat([column.train, column.val])
    edges = both.unique()
    if len(edges) > KINDS:
        edges = both.quantile(torch.linspace(0, 1, BINS + 1, dtype=both.dtype)[1:-1]).unique()
    return torch.bucketize(column.train, edges), torch.bucketize(column.val, edges)


def _predicted(
    codes: Tensor, y: Tensor, other: Tensor | None = None, its: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the mean target of a kind says of samples, and which have a kind that is known: of others, or each part of
    these samples by the rest."""
    size = int(max(codes.max(), codes.max() if other is None else other.max())) + 1
    mean = y.mean()

    def means(rows: Tensor) -> tuple[Tensor, Tensor]:
        count = torch.bincount(codes[rows], minlength=size)
        total = torch.bincount(codes[rows], y[rows] - mean, minlength=size)
        return total / (count + 3), count >= 3

    if other is not None:
        table, known = means(torch.arange(len(y)))
        return table[other], known[other]
    fold = torch.arange(len(y)) * FOLDS // len(y)
    guess, is_known = torch.zeros_like(y), torch.zeros(len(y), dtype=torch.bool)
    for k in range(FOLDS):
        table, known = means((fold != k).nonzero().flatten())
        guess[fold == k], is_known[fold == k] = table[codes[fold == k]], known[codes[fold == k]]
    return guess, is_known


def _correlation(guess: Tensor, known: Tensor, y: Tensor) -> tuple[float, float]:
    """The correlation of a guess with the target, and its error by leaving out blocks of neighbours."""
    guess, y = guess[known], y[known]
    if len(y) < FEWEST or float(y.std()) == 0 or float(guess.std()) == 0:
        return 0.0, 1.0
    block = torch.arange(len(y)) * BLOCKS // len(y)
    parts = torch.stack([guess, y, guess * guess, y * y, guess * y, torch.ones_like(y)])
    sums = torch.zeros(6, BLOCKS, dtype=y.dtype).index_add_(1, block, parts)
    without = _r(sums.sum(1, keepdim=True) - sums)
    r = float(_r(sums.sum(1, keepdim=True)))
    spread = float(((BLOCKS - 1) / BLOCKS * (without - without.mean()).pow(2).sum()).sqrt())
    return r, max(spread, (1 - r * r) / len(y) ** 0.5)


def _r(sums: Tensor) -> Tensor:
    x, y, xx, yy, xy, n = sums
    return (xy - x * y / n) / ((xx - x * x / n) * (yy - y * y / n)).clamp_min(1e-24).sqrt()


def constant(patient: Patient) -> Iterator[Finding]:
    """Numbers and channels that never change: beside others that do, or in one split alone."""
    (inputs, asked), found = places(patient), _columns(patient, channels=True)
    by_place: dict[int, list[Column]] = {}
    for column in found:
        by_place.setdefault(column.place, []).append(column)
    for place, columns in by_place.items():
        if len(columns[0].train) < FEWEST or place not in inputs | asked:
            continue
        still = [c for c in columns if _is_still(c.train)]
        where = f"train, tensor {place} of a sample"
        if still and len(still) < len(columns):
            text = (
                f"{len(still)} of the {len(columns)} numbers of {'a target' if place in asked else 'an input'}, tensor "
                f"{place} of a sample, never change in train: {_listed(still)}."
            )
            yield Finding(
                "constant_columns",
                text,
                where,
                {"columns": [c.number for c in still]},
                level="warning" if place in asked else "note",
            )
        for split, other, one in (("val", "train", False), ("train", "val", True)):
            alone = [c for c in columns if _stops(*((c.val, c.train) if one else (c.train, c.val)))]
            if alone and len(alone[0].val) >= FEWEST:
                text = f"{_listed(alone, one)} of tensor {place}: never changes in {split}, and does in {other}."
                yield Finding("constant_columns", text, f"{split}, tensor {place} of a sample", level="warning")


def _is_still(x: Tensor) -> bool:
    return bool((x == x[0]).all())


def _stops(varies: Tensor, still: Tensor) -> bool:
    """Whether a column is one value in one split, which is no luck by how often it is another in the other one."""
    if len(still) < FEWEST or not _is_still(still):
        return False
    share = float((varies != still[0]).double().mean())
    return (1 - share) ** len(still) < NEVER


def _listed(columns: list[Column], of_train: bool = True) -> str:
    each = [f"number {c.number} is {float((c.train if of_train else c.val)[0]):.4g}" for c in columns]
    return ", ".join(each[:6]) + (f" and {len(each) - 6} more" if len(each) > 6 else "")
