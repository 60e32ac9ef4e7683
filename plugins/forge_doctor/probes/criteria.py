"""Probes of what losses are given, by the numbers: smoothing, pairs, triplets, bounds, padding and bootstrapping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge_doctor.findings import Finding
from forge_doctor.experiments.intervene import exchanged
from forge_doctor.patient import Patient, tensors
from forge_doctor.probes.graph import leaves
from forge_doctor.watch import REGRESSION, LossCall, StepWatch, origin, outermost_calls

"""By which weights are multiplied, to see whether scores grow with them."""


def options(patient: Patient) -> Iterator[Finding]:
    """Options and targets that are wrong whatever the model is."""
    for call in patient.watched.losses:
        smoothing = float(call.given.get("label_smoothing") or 0.0)
        if smoothing > 0.5:
            yield Finding(
                "label_smoothing",
                f"{call.name} has label_smoothing={smoothing:g}: the right class gets {1 - smoothing:.0%} of the "
                "target, and all classes share the rest.",
                call.where,
                {"label_smoothing": smoothing},
            )
            return
        yield from _competing(call)


def _competing(call: LossCall) -> Iterator[Finding]:
    """Several labels of one sample, whose probabilities must sum to 1."""
    x, y = call.input, call.target
    if call.name != "binary_cross_entropy" or not isinstance(x, Tensor) or not isinstance(y, Tensor) or y.ndim < 2:
        return
    sums = y.float().sum(1)
    several = float((sums > 1.5).float().mean())
    is_shared = x.shape == y.shape and bool(((x.detach().float().sum(1) - 1).abs() < 1e-3).all())
    if origin(x) == "Softmax" and is_shared and several > 0.2:
        yield Finding(
            "competing_labels",
            f"{several:.0%} of the samples have more than one label, but a softmax makes their probabilities sum to 1: "
            "the labels compete.",
            call.where,
            {"several": several},
        )


def triplets(patient: Patient) -> Iterator[Finding]:
    """Triplets of the batch itself: the positive must not be the farther one in nearly all of them."""
    call = next((call for call in patient.watched.losses if call.name == "triplet_margin_loss"), None)
    batch = patient.batches[0]
    size = batch_size(batch)
    if call is None or size is None or size < 8:
        return
    places = [_feeds(patient, call.where, batch, size, key) for key in ("anchor", "positive", "negative")]
    if any(len(place) != 1 for place in places) or len({place[0] for place in places}) != 3:
        return
    wrong = []
    for given in patient.batches:
        watch = StepWatch(batch_size(given))
        with torch.no_grad(), watch:
            patient.run(patient.clone().eval(), given)
        inner = next(call for call in watch.losses if call.name == "triplet_margin_loss").given
        outer = [tensors(given)[place[0]].float().flatten(1) for place in places]
        for a, p, n in ([inner["anchor"], inner["positive"], inner["negative"]], outer):
            if a.shape != p.shape or a.shape != n.shape:
                return
            wrong.append(float(((a - p).flatten(1).norm(dim=1) > (a - n).flatten(1).norm(dim=1)).float().mean()))
    if min(wrong) > 0.8:
        share = sum(wrong) / len(wrong)
        yield Finding(
            "triplet_order",
            f"In {share:.0%} of the triplets the positive is farther from the anchor than the negative, in the inputs "
            "and in the embeddings: they are exchanged.",
            call.where,
            {"share": share},
        )


def _feeds(patient: Patient, where: str, batch: Any, size: int, key: str) -> list[int]:
    """Places of the tensors of a batch that an argument of the triplet loss depends on."""
    found = []
    base = _argument(patient, where, batch, key)
    for place, x in enumerate(tensors(batch)):
        if x.ndim and len(x) == size and x.is_floating_point():
            other = _argument(patient, where, exchanged(batch, x, lambda x: x.roll(1, 0)), key)
            if base is None or other is None or not torch.equal(base, other):
                found.append(place)
    return found


def _argument(patient: Patient, where: str, batch: Any, key: str) -> Tensor | None:
    watch = StepWatch(batch_size(batch))
    with torch.no_grad(), watch:
        patient.run(patient.clone().eval(), batch)
    return next((call.given[key] for call in watch.losses if call.where == where and key in call.given), None)


def bootstrap(patient: Patient) -> Iterator[Finding]:
    """A target made of a number of the batch and the model's own answer for another input, with its gradient."""
    pairs = [
        (call.input, call.target, call.where)
        for call in patient.watched.losses
        if call.name in REGRESSION and isinstance(call.target, Tensor) and call.target.requires_grad
    ]
    if not pairs and not patient.watched.differences:
        return
    task = patient.clone()
    with outermost_calls(task) as calls:
        patient.run(task, patient.batches[0])
    paths = [call.path for call in calls]
    if max((paths.count(path) for path in paths), default=0) < 2:
        return
    size = batch_size(patient.batches[0])
    base = _pairs_of(patient, patient.batches[0])
    changes = []
    for place, x in enumerate(tensors(patient.batches[0])):
        if x.ndim and len(x) == size and not torch.equal(x, x.roll(1, 0)):
            other = _pairs_of(patient, exchanged(patient.batches[0], x, lambda x: x.roll(1, 0)))
            if len(other) != len(base):
                return
            changes.append(
                [[_differs(a, b) for a, b in zip(p, q, strict=False)] for p, q in zip(base, other, strict=True)]
            )
    for number, (value, target, line) in enumerate(base):
        mine, theirs = ([change[number][side] for change in changes] for side in (0, 1))
        for side, own, others in ((target, mine, theirs), (value, theirs, mine)):
            alone = [b and not a for a, b in zip(own, others, strict=True)]
            if (
                sum(alone) >= 2
                and any(a and not b for a, b in zip(own, others, strict=True))
                and _is_bootstrapped(side)
            ):
                yield Finding(
                    "target_has_gradient",
                    "A target is the sum of a number of the batch and of the model's own answer for another input, and "
                    "carries a gradient: the loss moves the target, too.",
                    line,
                )
                return


def _pairs_of(patient: Patient, batch: Any) -> list[tuple[Tensor, Tensor, str]]:
    """Pairs of values with a gradient that a step compares."""
    watch = StepWatch(batch_size(batch))
    with watch:
        patient.run(patient.clone(), batch)
    found = [
        (call.input, call.target, call.where)
        for call in watch.losses
        if call.name in REGRESSION and isinstance(call.target, Tensor) and call.target.requires_grad
    ]
    return [*found, *watch.differences]


def _differs(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and (a.shape != b.shape or not torch.equal(a, b))


def _is_bootstrapped(x: Tensor) -> bool:
    """Whether a tensor is a number without a gradient plus a scaled one with it, by the model's own parameters."""
    node = x.grad_fn
    if node is None or not type(node).__name__.startswith("AddBackward"):
        return False
    children = [child for child, _ in node.next_functions]
    return sum(child is None for child in children) == 1 and any(True for _ in leaves(x))
