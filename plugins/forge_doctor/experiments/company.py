"""Company: a sample alone and among others, by the loader's own collate: the task must say the same of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge_doctor.experiments.intervene import calls_of, draws, parts
from forge_doctor.experiments.regroup import group_of
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient, are_samples

SAMPLES = 6
NEAR = 1e-3
"""Differences that count as none, as a share of the deviation."""


def alone(patient: Patient) -> Iterator[Finding]:
    """Collate some samples together and one by one: what the last layer says of each must stay."""
    stage = "val" if patient.can_validate else "train"
    group = group_of(patient, stage)
    if group is None or not group.is_collated or group.size < SAMPLES:
        return
    places = range(0, group.size, group.size // SAMPLES)[:SAMPLES]
    whole, batches = group.take(places), [group.take([i]) for i in places]
    if not _serves_the_same(whole, batches):
        return  # what is drawn as samples are put together, or an order of its own
    together, again = (_outputs(patient, whole, stage, seed) for seed in (SEED, SEED + 1))
    singles = [_outputs(patient, batch, stage) for batch in batches]
    for key, x in together.items():
        if any(key not in single for single in singles) or not _same(x, again.get(key)):
            return  # it draws random numbers, or does other things with one sample
    may_draw = are_samples(whole) or draws(patient, stage, whole)  # by place; edges between rows are none's to draw
    if may_draw and _tells_copies_apart(patient, group.take([places[0]] * SAMPLES), stage):
        return  # it has numbers of its own for each place, as noise of a fixed seed
    for key in list(together)[::-1]:
        rows = [single[key] for single in singles]
        worst = _apart(together[key], rows)
        if worst is None:
            continue
        if worst > NEAR:
            first = next((k[0] for k in together if (_apart(together[k], [s[k] for s in singles]) or 0) > NEAR), key[0])
            text = (
                f"What {key[0] or 'the task'} says of a sample differs by {worst:.2g} of its deviation between a batch "
                f"of {SAMPLES} and a batch of it alone, in evaluation mode; the first layer at which it does is "
                f"{first or 'the task itself'}. Padding, indices into the batch, or statistics over it reach the "
                "answers."
            )
            yield Finding("depends_on_company", text, first, {"difference": worst})
        return


def _tells_copies_apart(patient: Patient, copies: Any, stage: str) -> bool:
    """Whether rows of a batch differ that are all of one sample."""
    for x in _outputs(patient, copies, stage).values():
        if x.ndim and len(x) == SAMPLES and not _same(x, x[:1].expand_as(x)):
            return True
    return False


def _serves_the_same(whole: Any, singles: list[Any]) -> bool:
    """Whether rows of a batch hold what the samples alone do, as far as they have a common shape."""
    found = [parts(single) for single in singles]
    for path, x in parts(whole).items():
        rows = [single[path] for single in found if path in single]
        plain = x.is_floating_point() or (x.ndim > 1 and x.dtype != torch.bool)  # others may be places in the batch
        if len(rows) == len(found) and x.ndim and plain:
            apart = _apart(x, rows, prefix=2)
            if apart is not None and apart > NEAR:
                return False
    return True


def _outputs(patient: Patient, batch: Any, stage: str, seed: int = SEED) -> dict[tuple[str, int], Tensor]:
    calls, _ = calls_of(patient, batch, stage, seed=seed)
    return {key: out[0] for key, out in calls.items() if len(out) == 1}


def _same(x: Tensor, y: Tensor | None) -> bool:
    return y is not None and x.shape == y.shape and torch.allclose(x, y, 1e-4, 1e-5)


def _apart(x: Tensor, rows: list[Tensor], prefix: int = 3) -> float | None:
    """The largest difference between rows of a batch and the same rows alone; None where they have no common shape.

    Several rows of a sample may stand together, or as many parts that hold a row of each sample.
    """
    times, left = divmod(len(x), len(rows)) if x.ndim else (0, 0)
    by_part = x.unflatten(0, (times, len(rows))).transpose(0, 1).flatten(0, 1) if times > 1 and not left else x
    found = [_apart_in_order(y, rows, prefix) for y in (x, by_part)]
    return None if None in found else min(apart for apart in found if apart is not None)


def _apart_in_order(x: Tensor, rows: list[Tensor], prefix: int) -> float | None:
    parts: list[tuple[Tensor, Tensor]] = []
    total = sum(len(row) for row in rows if row.ndim)
    if not x.ndim or any(not row.ndim for row in rows) or len(x) != total:
        return None
    for whole, row in zip(x.split([len(row) for row in rows]), rows, strict=True):
        if whole.shape == row.shape:
            parts.append((whole, row))
        elif whole.ndim == row.ndim >= prefix and whole.shape[2:] == row.shape[2:] and row.shape[1] <= whole.shape[1]:
            parts.append((whole[:, : row.shape[1]], row))
        else:
            return None
    scale = float(x.float().std(correction=0)) or 1.0
    return max(float((a.float() - b.float()).abs().max()) for a, b in parts if a.numel()) / scale
