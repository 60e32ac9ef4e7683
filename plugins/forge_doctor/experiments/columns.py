"""Columns: each number of a sample over train beside val: it varies in both, and says the same of the target."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from forge_doctor.deadline import Deadline
from forge_doctor.experiments.intervene import exchanged
from forge_doctor.experiments.reading import places
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, tensors
from forge_doctor.probes.data import stacked
from forge_doctor.stored import Sample, spread

MOST_SAMPLES, MOST_COLUMNS, MOST_TARGETS, FEWEST = 4000, 64, 8, 100
MOST_NUMBERS = 4096
"""Of a sample that is read again."""
SECONDS = 3.0
"""For reading samples of a split in their order."""
KINDS, BINS, FOLDS, BLOCKS = 64, 16, 5, 10
"""Different values of a column that are read as kinds, bins of others, folds of a fit, and blocks of its error."""
TELLS, LESS, FAR = 0.15, 0.65, 5.0
"""A correlation that is worth a look, the share of it that must be left in the other split, and how many errors it must
be away."""
ALIKE = 0.3
"""The share of samples by which values may differ in the splits that are compared by what they say."""
EXACT = 1e-3
"""By how many errors of a mean it may be off that is exactly 0."""
END, FAR_OFF = 0.05, 2.0
"""How far beyond the others, as a share of their range, a value is their end at most, and none of them at least."""
GROUPS, PRIORS, EXACT_ORDER = 8, (0, 1, 2, 5, 10, 20, 30, 50, 100), 0.9995
"""Groups of samples, at least; samples of the mean that an average is drawn to; and the order that is no luck."""
NEVER = 1e-9
"""The chance at which a column that does not vary by luck is told."""


@dataclass
class Column:
    """One number of all samples of both splits."""

    place: int
    number: int
    train: Tensor
    val: Tensor
    is_channel: bool
    "A channel of pictures or series, by its one value; NaN where it has several in a sample."
    orders: tuple[Tensor, Tensor]
    "The samples of both splits, with those that are equal in this tensor side by side."

    @property
    def name(self) -> str:
        return f"number {self.number} of tensor {self.place}"

    @cached_property
    def codes(self) -> tuple[Tensor, Tensor]:
        """The kinds, or bins, of the values in both splits."""
        both = torch.cat([self.train, self.val])
        edges = both.unique()
        if len(edges) > KINDS:
            edges = both.quantile(torch.linspace(0, 1, BINS + 1, dtype=both.dtype)[1:-1]).unique()
        return torch.bucketize(self.train, edges), torch.bucketize(self.val, edges)

    @property
    def is_alike(self) -> bool:
        """Whether the values are as frequent in one split as in the other."""
        if min(len(self.train), len(self.val)) < FEWEST:
            return False
        most = int(torch.cat(self.codes).max()) + 1
        one, other = (torch.bincount(code, minlength=most) / len(code) for code in self.codes)
        return float((one - other).abs().sum()) / 2 < ALIKE


def samples(patient: Patient, split: str) -> list[Sample]:
    """Samples in the order of the dataset, where they are what the batches hold; else as they are served."""
    served = patient.samples if split == "train" else patient.val_samples
    shapes = [x.shape for x in served[0]] if served else []
    is_small = bool(served) and sum(x.numel() for x in served[0]) <= MOST_NUMBERS
    within = Deadline(SECONDS, time.process_time)
    found = spread(patient.loaders[split], MOST_SAMPLES, within) if is_small else []
    return found if found and all([x.shape for x in sample] == shapes for sample in found) else served


def _columns(patient: Patient) -> list[Column]:
    """The numbers of samples that have few of them, and the channels of others."""
    train, val = (stacked(patient, samples(patient, split)) for split in ("train", "val"))
    found = []
    for place, x in train.items():
        y = val.get(place, x[:0])
        y = y if x.shape[1:] == y.shape[1:] else x[:0]
        is_channel = x.ndim > 2 and x.is_floating_point() and x[0].numel() > 0
        if is_channel:
            x, y = (_level(z.float().flatten(2)) for z in (x, y))
        if x.ndim <= 2 and 0 < x[0].numel() <= MOST_COLUMNS and not x.is_complex():
            one, other = (z.double() if z.ndim == 2 else z.double().unsqueeze(1) for z in (x, y))
            orders = _side_by_side(one), _side_by_side(other)
            found += [Column(place, i, one[:, i], other[:, i], is_channel, orders) for i in range(one.shape[1])]
    return found


def _level(x: Tensor) -> Tensor:
    return torch.where(x.amin(2) == x.amax(2), x[..., 0], torch.nan)


def _side_by_side(rows: Tensor) -> Tensor:
    """The order of rows in which equal ones follow each other, where the first of them was."""
    if not len(rows):
        return torch.arange(0)
    kinds, keys = rows.unique(dim=0, return_inverse=True)
    first = torch.full((len(kinds),), len(rows)).scatter_reduce(0, keys, torch.arange(len(rows)), "amin")
    return first[keys].argsort(stable=True)


def compared(patient: Patient) -> Iterator[Finding]:
    """What varies in one split varies in the other, by the same scale and names, and says the same of the target."""
    (inputs, asked), found = places(patient), _columns(patient)
    found = [column for column in found if column.place in inputs | asked]
    yield from _constant(found, asked)
    yield from _scaled_by_itself([column for column in found if not column.is_channel])
    plain = [column for column in found if not column.is_channel]
    yield from _made_of_targets([c for c in plain if c.place in inputs], [c for c in plain if c.place in asked])
    yield from _filled_in(plain, asked)
    told = {place for place in asked if not _is_a_name(patient, place)}
    yield from _agree([c for c in found if not c.is_channel and c.place in inputs | told], told)


def _is_a_name(patient: Patient, place: int) -> bool:
    """Whether other numbers for the classes leave the loss as it is: they tell samples apart, and mean no more."""
    batch = patient.batches[0]
    y = tensors(batch)[place]
    if y.is_floating_point() or not y.numel():
        return False
    other = exchanged(batch, y, lambda y: (y.long().max() + y.long().min() - y.long()).to(y.dtype))
    with suppress(Exception):  # a number that is left out, such as 255, is no class
        one, two = (patient.loss(patient.clone(), x).detach() for x in (batch, other))
        return torch.allclose(one, two, 1e-5)
    return False


def _filled_in(columns: list[Column], asked: set[int]) -> Iterator[Finding]:
    """A value that many samples have, and that stands for none: among targets of which hardly any other occurs twice,
    or far from all others of an input. The end of a scale is neither."""
    for column in columns:
        if len(column.train) < FEWEST:
            continue
        kinds, counts = column.train.unique(return_counts=True)
        most = int(counts.argmax())
        value, others = float(kinds[most]), torch.cat([kinds[:most], kinds[most + 1 :]])
        share, span = int(counts[most]) / len(column.train), float(others[-1] - others[0]) if len(others) else 0.0
        beyond = max(float(others[0]) - value, value - float(others[-1])) if len(others) else 0.0
        seen = f"{column.name.capitalize()} is exactly {value:.4g} in {share:.0%} of the samples"
        if column.place in asked:
            left = len(column.train) - int(counts[most])
            is_end = 0 < beyond < END * span
            if share > 0.05 and len(others) > 0.8 * left > 0.8 * FEWEST / 2 and not is_end:
                text = (
                    f"{seen}, and hardly any other value occurs twice: targets that are missing may have been filled "
                    "in, and are learnt."
                )
                yield Finding("targets_filled_in", text, f"train, {column.name}", {"share": share})
                return
        elif share > 0.01 and len(others) >= FEWEST and beyond > FAR_OFF * span:
            text = (
                f"{seen}, and the other {len(others)} values lie between {float(others[0]):.4g} and "
                f"{float(others[-1]):.4g}, far from it: a value that stands for what is missing is taken for a number."
            )
            cure = (
                "Fill in the mean of the others, give the model a column that says so, and take statistics without it."
            )
            yield Finding("bad_values", text, f"train, {column.name}", {"share": share, "value": value}, cure, "note")
            return


def _made_of_targets(inputs: list[Column], targets: list[Column]) -> Iterator[Finding]:
    """Columns that say of each group of samples what the mean target of all its samples is, those of val
    included, and not of those of train alone."""
    for column, target in ((c, t) for c in inputs for t in targets):
        both, y = torch.cat([column.train, column.val]), torch.cat([target.train, target.val])
        kinds, group = both.unique(return_inverse=True)
        is_val = torch.arange(len(both)) >= len(column.train)
        shared = len(torch.unique(group[is_val])) and torch.isin(group[is_val], group[~is_val]).double().mean() > 0.5
        if len(both) != len(y) or not GROUPS <= len(kinds) <= len(both) / 3 or not shared:
            continue
        known = torch.bincount(group[~is_val], minlength=len(kinds)) > 0
        whole, part = (
            _fit(kinds[known], *_sums(group, y * w, w.double(), len(kinds), known)) for w in (1 + 0 * is_val, ~is_val)
        )
        if whole > EXACT_ORDER and part < whole - 0.5 * (1 - EXACT_ORDER):
            text = (
                f"{column.name.capitalize()} of a sample takes {len(kinds)} values, which are the mean target of the "
                f"samples that share one, those of val included (correlation {whole:.4f}; {part:.4f} by those "
                "of train alone): it is made of targets that are not known when predicting."
            )
            yield Finding("leakage", text, f"train and val, {column.name}", {"all": whole, "train alone": part})
            return


def _sums(group: Tensor, y: Tensor, weight: Tensor, size: int, known: Tensor) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(size, dtype=torch.float64)
    return zeros.index_add(0, group, y.double())[known], zeros.index_add(0, group, weight)[known]


def _fit(values: Tensor, total: Tensor, count: Tensor) -> float:
    """The best correlation of values with means, as they are or drawn to the mean of all."""
    mean = float(total.sum() / count.sum())
    made = ((total + k * mean) / (count + k).clamp_min(1e-9) for k in PRIORS)
    return max(abs(float(torch.corrcoef(torch.stack([values.double(), x]))[0, 1].nan_to_num())) for x in made)


def _agree(found: list[Column], asked: set[int]) -> Iterator[Finding]:
    """Predict the target by one column: what it says in train, it must say in val."""
    renamed = next((told for column in found if (told := _renamed(column)) is not None), None)
    if renamed is not None:
        yield renamed
        return
    sides = [side for column in found if column.place in asked for side in _sides(column)]
    if not 0 < len(sides) <= MOST_TARGETS:
        return  # a sequence or a picture is no column's to tell
    y = tuple(torch.stack(side, 1) for side in zip(*sides, strict=True))
    told = [(*_told(column, y), column) for column in found if column.place not in asked and column.is_alike]
    far, train, val, over, column = max(told, key=lambda one: one[0], default=(0.0,) * 5)
    if far < FAR or not isinstance(column, Column):
        return
    by = f"By {column.name} of a sample the target is predicted with a correlation of"
    if train < LESS * val:
        text = f"{by} {val:.2f} in val, and of {train:.2f} in train: labels of train may belong to other samples."
    elif val < LESS * train:
        text = f"{by} {train:.2f} in train, and of {val:.2f} in val: as if a sample's own target had helped to make it."
    else:
        text = (
            f"{by} {train:.2f} in train and {val:.2f} in val, but of {over:.2f} by what its values mean in the other "
            "split: they are encoded in another way there."
        )
    evidence = {"train": train, "val": val, "from one to the other": over, "errors apart": far}
    yield Finding("splits_disagree", text, f"train and val, {column.name}", evidence, level="note")  # or a shift


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
    if apart < ALIKE + luck / 2 or unnamed > 0.05 + luck / 3 or known < 0.5:
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
    if not target.is_alike:
        return
    if not whole or len(kinds) == 2 or len(kinds) > 20:
        yield target.train, target.val
        return
    for kind in kinds[counts.argsort(descending=True)[:MOST_TARGETS]]:
        yield (target.train == kind).double(), (target.val == kind).double()


def _told(column: Column, y: tuple[Tensor, ...]) -> tuple[float, float, float, float]:
    """By how many errors train and val differ, at most; the correlations in each, and from one to the other."""
    codes = [code[order] for code, order in zip(column.codes, column.orders, strict=True)]
    y = tuple(side[order] for side, order in zip(y, column.orders, strict=True))
    own = [_correlation(*_predicted(codes[i], y[i]), y[i]) for i in (0, 1)]
    over = [_correlation(*_predicted(codes[i], y[i], codes[1 - i]), y[1 - i]) for i in (0, 1)]
    worst = 0.0, 0.0, 0.0, 0.0
    for i, less in ((0, LESS), (1, 0.5 * LESS)):
        (r, error), (other, its_error) = own[i], over[i]
        far = (r - other) / (error**2 + its_error**2).sqrt() * ((r > TELLS) & (other < less * r))
        at = int(far.argmax())
        worst = max(worst, (float(far[at]), float(own[0][0][at]), float(own[1][0][at]), float(other[at])))
    return worst


def _predicted(codes: Tensor, y: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the mean targets of a kind say of samples, and which have a kind that is known: of others, or each part of
    these samples by the rest."""
    size = int(codes.max() if other is None else max(codes.max(), other.max())) + 1
    centred = y - y.mean(0)

    def means(rows: Tensor) -> tuple[Tensor, Tensor]:
        count = torch.bincount(codes[rows], minlength=size)
        total = torch.zeros(size, y.shape[1], dtype=y.dtype).index_add_(0, codes[rows], centred[rows])
        return total / (count + 3)[:, None], count >= 3

    if other is not None:
        table, known = means(torch.arange(len(y)))
        return table[other], known[other]
    fold = torch.arange(len(y)) * FOLDS // len(y)
    guess, is_known = torch.zeros_like(y), torch.zeros(len(y), dtype=torch.bool)
    for k in range(FOLDS):
        table, known = means((fold != k).nonzero().flatten())
        guess[fold == k], is_known[fold == k] = table[codes[fold == k]], known[codes[fold == k]]
    return guess, is_known


def _correlation(guess: Tensor, known: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The correlations of guesses with targets, and their errors by leaving out blocks of neighbours."""
    guess, y = guess[known], y[known]
    if len(y) < FEWEST:
        return torch.zeros(y.shape[1]), torch.ones(y.shape[1])
    block = torch.arange(len(y)) * BLOCKS // len(y)
    guess, y = guess - guess.mean(0), y - y.mean(0)
    parts = torch.stack([guess, y, guess * guess, y * y, guess * y, torch.ones_like(y)])
    sums = torch.zeros(6, BLOCKS, y.shape[1], dtype=y.dtype).index_add_(1, block, parts)
    whole = sums.sum(1)
    r, without = _r(whole), _r(whole[:, None] - sums)
    spread = ((BLOCKS - 1) / BLOCKS * (without - without.mean(0)).pow(2).sum(0)).sqrt()
    return r, spread.maximum((1 - r * r) / len(y) ** 0.5)


def _r(sums: Tensor) -> Tensor:
    x, y, xx, yy, xy, n = sums
    return (xy - x * y / n) / ((xx - x * x / n) * (yy - y * y / n)).clamp_min(1e-20).sqrt()


def _constant(found: list[Column], asked: set[int]) -> Iterator[Finding]:
    """Numbers of a target that never change beside others that do; numbers and channels that stop in one split."""
    for place in dict.fromkeys(column.place for column in found):
        columns = [column for column in found if column.place == place]
        what = "channels" if columns[0].is_channel else "numbers"
        still = [c for c in columns if len(c.train) >= FEWEST and _is_still(c.train)]
        is_number = any(bool((c.train != c.train.round()).any()) for c in columns)  # no mask, and no rare tag
        if still and len(still) < len(columns) and place in asked and is_number and not columns[0].is_channel:
            text = (
                f"{len(still)} of {len(columns)} numbers of a target, tensor {place} of a sample, never change in "
                f"train: {_listed(still, [c.train for c in still])}."
            )
            evidence = {"columns": [c.number for c in still]}
            where = f"train, tensor {place} of a sample"
            yield Finding("constant_columns", text, where, evidence, level="warning")
        for split, other in (("val", "train"), ("train", "val")):
            alone = [c for c in columns if _stops(getattr(c, other), getattr(c, split))]
            if alone:
                text = (
                    f"{len(alone)} of {len(columns)} {what} of tensor {place} of a sample never change in {split}, and "
                    f"do in {other}: {_listed(alone, [getattr(c, split) for c in alone])}."
                )
                evidence = {"columns": [c.number for c in alone]}
                level = "warning" if len(columns) > 1 else "note"  # train may hold one kind alone, on purpose
                yield Finding("constant_columns", text, f"{split}, tensor {place}", evidence, level=level)


def _scaled_by_itself(found: list[Column]) -> Iterator[Finding]:
    """Columns of val whose mean and deviation, or ends, are 0 and 1 more exactly than statistics of train make them."""
    varied = [c for c in found if len(c.val) >= FEWEST and len(c.val.unique()) > KINDS]
    exact = [c for c in varied if _is_exact(c.val)]
    if len(exact) >= max(2, len(varied) / 2):
        text = (
            f"{len(exact)} of {len(varied)} numbers of a sample have the mean 0 and the deviation 1, or the ends 0 and "
            f"1, over val alone, far more exactly than by statistics of train: val is scaled by its own "
            f"({', '.join(c.name for c in exact[:3])})."
        )
        yield Finding("split_statistics", text, "val", {"columns": [(c.place, c.number) for c in exact]})


def _is_exact(x: Tensor) -> bool:
    """Whether numbers were scaled by their own mean and deviation, or by their own least and largest."""
    error = EXACT / len(x) ** 0.5
    at_ends = [int(((x - end).abs() < 1e-6).sum()) for end in (0, 1)]
    deviations = [abs(float(x.std(correction=k)) - 1) for k in (0, 1)]
    is_standard = abs(float(x.mean())) < error and min(deviations) < error
    return is_standard or (at_ends == [1, 1] and bool(((x > -1e-6) & (x < 1 + 1e-6)).all()))


def _is_still(x: Tensor) -> bool:
    return bool((x == x[0]).all())


def _stops(varies: Tensor, still: Tensor) -> bool:
    """Whether a column is one value in one split, which is no luck by how often it is another in the other one."""
    if len(still) < FEWEST or not _is_still(still):
        return False
    share = float((varies != still[0]).double().mean())
    return (1 - share) ** len(still) < NEVER


def _listed(columns: list[Column], values: list[Tensor]) -> str:
    each = [f"number {c.number} is {float(x[0]):.4g}" for c, x in zip(columns, values, strict=True)]
    return ", ".join(each[:6]) + (f" and {len(each) - 6} more" if len(each) > 6 else "")
