"""Reading: find the tensors that answers depend on, and the target that they are compared with."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge_doctor.experiments.answers import Answers, answers, held_of
from forge_doctor.experiments.intervene import exchanged, parts
from forge_doctor.patient import Patient, tensors
from forge_doctor.probes.data import is_target


def sides(held: Answers) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a batch that answers depend on; and those that do no more than the loss of given answers."""
    size, batch = batch_size(held.batch), held.batch
    slopes, asked, told = held.slopes(), [], []
    for x in parts(batch).values():
        if not x.ndim or len(x) != size or torch.equal(x, x.roll(1, 0)):
            continue
        other = exchanged(batch, x, lambda x: x.roll(1, 0))
        with suppress(Exception):  # the step refuses it: a length or an offset, no target
            now = answers(held.patient, other, stage=held.stage)
            if now is None:
                continue
            if not all(torch.equal(a, b) for a, b in zip(held.values, now.values, strict=True)):
                asked.append(x)
            elif not all(torch.allclose(a, b) for a, b in zip(slopes, held.slopes(batch=other), strict=True)):
                told.append(x)
    return asked, told


def target_of(held: Answers) -> Tensor | None:
    """The one tensor of a batch that answers are compared with; a mask is none."""
    _, found = sides(held)
    marks = [x for x in found if any(x is not y and _marks(x, y) for y in found)]
    left = [x for x in found if all(x is not y for y in marks)]
    return left[0] if len(left) == 1 else None


def places(patient: Patient) -> tuple[set[int], set[int]]:
    """The places of the tensors of a batch that answers depend on, and of those that they are compared with."""
    batch = patient.batches[0]
    count = range(len(tensors(batch)))
    told = {i for i in count if is_target(patient, i)}
    asked = set(count) - told
    with suppress(Exception):
        held = held_of(patient, batch)
        if held is not None and held.values[0].isfinite().all():
            one, other = ({id(x) for x in found} for found in sides(held))
            given = [id(x) for x in tensors(batch)]
            asked, told = {i for i in asked if given[i] in one}, told | {i for i in count if given[i] in other}
    return asked, told


def _marks(x: Tensor, y: Tensor) -> bool:
    """Whether a tensor holds the lengths of another, or marks its positions."""
    if y.ndim < 2:
        return False
    if x.ndim == 1 and not x.is_floating_point():
        return int(x.min()) >= 1 and 2 < int(x.max()) <= y.shape[1]
    return x.shape == y.shape[:2] and bool(((x == 0) | (x == 1)).all())


def predicts(patient: Patient, batch: Any) -> bool:
    """Whether the answers to a batch are a prediction of one target, those of a sample of its own."""
    with suppress(Exception):
        held = held_of(patient, batch) if (batch_size(batch) or 0) >= 4 else None
        y = target_of(held) if held is not None else None
        if held is None or y is None or not _is_by_sample(held, y):
            return False
        if sum(_squeezed(x) == _squeezed(y) for x in held.values) == 1 and (y.is_floating_point() or _is_binary(y)):
            return True
        return not y.is_floating_point() and sum(_has_classes(x, y) for x in held.values) == 1
    return False


def _is_by_sample(held: Answers, y: Tensor) -> bool:
    """Whether the gradient at a sample's answer depends on its own target, not on those of the others."""
    half = len(y) // 2
    other = exchanged(held.batch, y, lambda x: torch.cat([x[:half], x[-1:].expand_as(x[half:])]))
    rows = lambda slopes: torch.cat([g[:half].flatten() for g in slopes if g.ndim and len(g) == len(y)])  # noqa: E731
    mine, theirs = rows(held.slopes()).double(), rows(held.slopes(batch=other)).double()
    return bool(F.cosine_similarity(mine, theirs, dim=0) > 0.98)


def _is_binary(y: Tensor) -> bool:
    return y.unique().tolist() in ([0, 1], [-1, 1], [False, True])


def _squeezed(x: Tensor) -> list[int]:
    return [n for n in x.shape if n != 1]


def _has_classes(x: Tensor, y: Tensor) -> bool:
    """Whether a dimension of an answer, the last or the second, holds scores of classes."""
    if x.ndim != y.ndim + 1 or y.ndim < 1:
        return False
    dims = [d for d in (x.ndim - 1, 1) if [n for i, n in enumerate(x.shape) if i != d] == list(y.shape)]
    return any(x.shape[d] > max(1, int(y.max())) for d in dims)
