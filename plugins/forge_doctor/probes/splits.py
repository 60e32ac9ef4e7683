"""Probes of what belongs together: windows of one series in both splits, near copies, rows and labels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_doctor.findings import Finding
from forge_doctor.patient import Patient
from forge_doctor.probes.data import stacked
from forge_doctor.probes.reference import MODELS, MOST_ROWS, Table, crossed, table
from forge_doctor.stored import in_order

STEPS = 8
"""Steps of a stretch of a series that is looked up."""
MOST_LENGTH = 2000
COPIES = 4
"""Near copies of one sample that are looked for."""
NEAR = 0.25
"""How near copies are, against the next sample. By chance a third of the points of a curve are, and fewer elsewhere."""


def overlaps(patient: Patient) -> Iterator[Finding]:
    """Windows of one series, cut before the split: those of val begin and end inside those of train."""
    train, val = stacked(patient, patient.samples), stacked(patient, patient.val_samples)
    for place, x in train.items():
        y = val.get(place)
        if y is None or x.shape[1:] != y.shape[1:] or x.dtype != y.dtype or len(y) < 20:
            continue
        for a, b in _as_series(x, y):
            begin, end = _shared_ends(a, b)
            if begin >= 0.5 and end >= 0.5:
                yield Finding(
                    "leakage",
                    f"Windows of val and of train overlap: {begin:.0%} of {len(b)} validation windows begin, and "
                    f"{end:.0%} end, with {STEPS} steps that a training window holds at another offset.",
                    "val",
                    {"begin": begin, "end": end, "windows": len(b)},
                    cure="Split the series by time first, and cut each part into windows.",
                )
                return


def _as_series(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples as series of whole-number keys, one per step; time may be either dimension of two."""
    if not x.is_floating_point() or x.ndim not in (2, 3) or float((x != x.round()).float().mean()) < 0.5:
        return
    for turned in (False, True) if x.ndim == 3 else (False,):
        a, b = (z.transpose(1, 2) if turned else z for z in (x, y))
        if STEPS + 2 <= a.shape[1] <= MOST_LENGTH:
            yield _keys(a), _keys(b)


def _keys(x: Tensor) -> Tensor:
    """One whole number for each step, from the bits of its first channels."""
    bits = x.float().contiguous().view(torch.int32).long()
    if bits.ndim == 2:
        return bits
    key = torch.zeros(bits.shape[:2], dtype=torch.long)
    for channel in range(min(4, bits.shape[2])):
        key = _mixed(key + bits[:, :, channel])
    return key


def _mixed(key: Tensor) -> Tensor:
    key = key * 6364136223846793005 + 1442695040888963407
    return key ^ (key >> 29)


def _stretches(keys: Tensor) -> Tensor:
    """One whole number for each stretch of steps; 0 where half of its steps repeat the one before."""
    found = torch.zeros_like(keys[:, STEPS - 1 :])
    count = found.shape[1]
    for step in range(STEPS):
        found = _mixed(found + keys[:, step : step + count])
    total = F.pad((keys[:, 1:] != keys[:, :-1]).int().cumsum(1), (1, 0))
    moves = total[:, STEPS - 1 :] - total[:, :count]
    return torch.where(moves > STEPS // 2, found, 0)


def _shared_ends(train: Tensor, val: Tensor) -> tuple[float, float]:
    """The shares of windows of val whose first, and whose last stretch a window of train has at another offset.

    Neither is possible for all windows of a later time. A series that repeats itself has the same stretch at the same
    offset in several windows of train, and is left out.
    """
    a, b = _stretches(train), _stretches(val)
    some = a[:400]
    moving = some != 0
    placed = _mixed(some + torch.arange(some.shape[1]))[moving]
    if not bool(moving.any()) or len(placed.unique()) < 0.95 * len(placed):
        return 0.0, 0.0
    return _share_found(b[:, 0], a[:, 1:]), _share_found(b[:, -1], a[:, :-1])


def _share_found(keys: Tensor, among: Tensor) -> float:
    """The share of keys, 0 apart, that are among others."""
    wanted = keys.unique()
    place = torch.searchsorted(wanted, among.contiguous()).clamp_max(len(wanted) - 1)
    found = wanted[place[(wanted[place] == among) & (among != 0)].unique()]
    return float(torch.isin(keys, found).float().mean())


def near_copies(patient: Patient) -> Iterator[Finding]:
    """Samples of val that nearly are samples of train with the same target: augmented before the split."""
    train, val = table(patient, patient.samples, 3000), table(patient, patient.val_samples)
    if train is None or val is None or len(train) < 100 or len(val) < 30 or train.x.shape[1] != val.x.shape[1]:
        return
    if train.has_classes and float(train.y.sum(0)[train.y.sum(0) > 0].median()) < 12:  # few samples of one person each
        return
    continuous = torch.tensor([len(column.unique()) > 0.9 * len(train) for column in train.x.T])
    if int(continuous.sum()) < 4:
        return
    scale = continuous / train.x.std(0).clamp_min(1e-6)
    near = torch.cdist(val.x * scale, train.x * scale).topk(COPIES + 1, largest=False)
    steps = near.values[:, :-1] / near.values[:, 1:].clamp_min(1e-9)
    has_target = (train.y[near.indices[:, 0]] == val.y).all(1)
    is_copy = (steps < NEAR).any(1) & (near.values[:, 0] > 1e-4 * near.values[:, -1]) & has_target
    share = float(is_copy.float().mean())
    if share > 0.5:
        yield Finding(
            "leakage",
            f"{share:.0%} of {len(val)} validation samples nearly are training samples with the same target: 1 to "
            f"{COPIES} of those are {1 / NEAR:.0f} times as near as the next.",
            "val",
            {"share": share, "samples": len(val)},
            cure="Split before augmenting, and by groups where samples belong together.",
        )


def shifted(patient: Patient) -> Iterator[Finding]:
    """Labels that belong to the row before or after, in the order of the dataset."""
    for name, loader in patient.loaders.items():
        samples = in_order(loader, patient.samples[0], MOST_ROWS) if patient.samples else []
        rows = table(patient, samples) if len(samples) >= 200 else None
        if rows is None or _are_related(rows.x):
            continue
        skills = {0: _best(_moved(rows, 0))}
        if skills[0] >= 0.05:
            continue
        skills |= {shift: _best(_moved(rows, shift)) for shift in (-1, 1)}
        best = max((-1, 1), key=lambda shift: skills[shift])
        if skills[best] > 0.25 and not _is_lag(_moved(rows, best), best):
            text = (
                f"Labels are shifted by one row: a simple model explains {max(0, skills[0]):.0%} of the targets from "
                f"their own rows, and {skills[best]:.0%} from the row {'before' if best > 0 else 'after'} them."
            )
            yield Finding("labels_shifted", text, name, {"own": skills[0], "before": skills[1], "after": skills[-1]})
            return


def _moved(rows: Table, shift: int) -> Table:
    """Each row with the target of the row that is `shift` rows later."""
    count = len(rows) - abs(shift)
    first, later = max(0, -shift), max(0, shift)
    return Table(rows.x[first : first + count], rows.y[later : later + count], rows.has_classes)


def _best(rows: Table) -> float:
    return max(crossed(model, rows) for model in MODELS.values())


def _standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0).clamp_min(1e-6)


def _are_related(x: Tensor) -> bool:
    """Whether columns of a row follow from those of the row before, as in a series."""
    x = _standardised(x)
    return float((x[1:].T @ x[:-1] / len(x)).abs().max()) > 0.5


def _is_lag(rows: Table, shift: int) -> bool:
    """Whether one column is nearly the target itself, as the last known value is in a forecast.

    It is the target of the row before, unless time runs backwards, and may be known with noise.
    """
    related = float((_standardised(rows.x).T @ _standardised(rows.y) / len(rows)).abs().max())
    return related > (0.5 if shift < 0 else 0.7)
