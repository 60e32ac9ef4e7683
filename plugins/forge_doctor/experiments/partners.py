"""Partners: the answers that a sample's input decides must be those that its target judges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge.torch_internals import pytree
from forge_doctor.experiments.answers import Answers, answers, held_of
from forge_doctor.experiments.equivariance import MOST_STEPS, in_steps, rolled_at
from forge_doctor.experiments.intervene import exchanged
from forge_doctor.experiments.reading import sides
from forge_doctor.experiments.regroup import group_of
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, are_samples

SAMPLES, FEWEST = 12, 6
"""Samples of the batch that is tried, and those that must tell something."""
CLEARLY, TIMES = 0.15, 1.8
"""By how much, or how many times, another sample's target must fit better than its own."""
MOST, MOST_CLASSES = 0.4, 4096
"""The share of samples that must have a better partner; classes of which one answer consists."""


def partners(patient: Patient) -> Iterator[Finding]:
    """Exchange the input of one sample after another, and its target: both must matter at the same places."""
    group = group_of(patient)
    if len(patient.names) > 1 or group is None or group.size < SAMPLES:
        return
    batch = group.take(range(SAMPLES))
    held = answers(patient, batch) if are_samples(batch) else None
    if held is None:
        return
    asked, told = sides(held)
    if not asked or not told:
        return
    decided = _profiles(held, asked, lambda other: _answers_to(held, other), held.values)
    judged = _profiles(held, told, lambda other: held.slopes(batch=other), held.slopes())
    known = [i for i in range(SAMPLES) if float(decided[i].sum()) > 0 and float(judged[i].sum()) > 0]
    if len(known) < FEWEST:
        return
    fit = F.cosine_similarity(decided[known][:, None], judged[known][None], dim=2)
    own = fit.diagonal()
    others = (fit - 2 * torch.eye(len(known))).amax(1)
    worse = int(((others > own + CLEARLY) | (others > TIMES * own)).sum())
    if worse > MOST * len(known):
        yield Finding(
            "compared_with_others",
            f"Of {len(known)} samples, {worse} have answers that are compared with the target of another sample more "
            "than with their own: what exchanging an input moves is not what exchanging its target judges otherwise "
            f"(they fit by {float(own.mean()):.2f}, and by {float(others.mean()):.2f} with another).",
            patient.place(),
            {"samples": len(known), "with another": worse},
        )


def steps(patient: Patient) -> Iterator[Finding]:
    """Exchange a step of the target: where steps are judged one by one, the answers that it judges stand together."""
    batch = patient.batches[0]
    size, held = batch_size(batch), held_of(patient, batch) if len(patient.names) == 1 else None
    if held is None or size is None or size < FEWEST or len(held.values) != 1:
        return
    base = held.slopes()
    for y in sides(held)[1]:
        if y.ndim < 2 or y.shape[:1] != (size,) or not FEWEST <= y.shape[1] <= MOST_STEPS:
            continue
        spread = []
        for t in (y.shape[1] // 3, y.shape[1] // 2):
            now = held.slopes(batch=exchanged(batch, y, lambda y, t=t: rolled_at(y, t)))
            off = in_steps(base[0] != now[0], size, y.shape[1])
            if off is not None and bool(off.any()):
                sample = off[int(off.flatten(1).sum(1).argmax())].flatten(1)
                spread.append((int(sample.sum()), sample.shape[1], sample.any(1).nonzero().flatten().tolist()))
        # as many answers as one step has, and at others
        apart = [
            any(b - a > 1 for a, b in itertools.pairwise(steps)) and moved <= most for moved, most, steps in spread
        ]
        if len(apart) == 2 and all(apart):
            steps = spread[0][2]
            yield Finding(
                "compared_with_others",
                f"Step {y.shape[1] // 3} of the target judges answers at {len(steps)} steps, which do not stand "
                f"together ({', '.join(map(str, steps[:6]))}): a view or reshape stands where axes are to be "
                "exchanged.",
                patient.place(),
                {"steps": steps},
                cure="Exchange axes by transpose, permute or movedim; view and reshape read the same numbers in order.",
            )
            return


def _answers_to(held: Answers, batch: Any) -> list[Tensor]:
    found = answers(held.patient, batch)
    if found is None:
        raise LookupError("no answers to the batch of another input")
    return found.values


def _profiles(held: Answers, given: list[Tensor], tried: Any, base: list[Tensor]) -> Tensor:
    """For each sample: by how much each answer moves when these tensors of it are those of another sample."""
    found = []
    for i in range(SAMPLES):
        other = next(
            (j % SAMPLES for j in range(i + 1, i + SAMPLES) if any(not _same(x, i, j % SAMPLES) for x in given)), i
        )
        now = base
        with suppress(Exception):  # another length, which the step refuses: that sample tells nothing
            now = tried(_exchanged(held.batch, given, i, other))
        moved = [_moved(x, y) if x.shape == y.shape else _moved(x, x) for x, y in zip(base, now, strict=True)]
        found.append(torch.cat(moved))
    return torch.stack(found)


def _same(x: Tensor, i: int, j: int) -> bool:
    return torch.equal(x[i], x[j])


def _exchanged(batch: Any, given: list[Tensor], i: int, j: int) -> Any:
    def other(x: Any) -> Any:
        if not any(x is y for y in given):
            return x
        x = x.clone()
        x[i] = x[j]
        return x

    return pytree.tree_map(other, batch)


def _moved(x: Tensor, y: Tensor) -> Tensor:
    """How far each answer is from what it was: one number of each vector of classes."""
    apart = (x.double() - y.double()).abs()
    return (apart.sum(-1) if apart.ndim > 1 and apart.shape[-1] <= MOST_CLASSES else apart).flatten()
