"""Probes of what losses are given, by the numbers: smoothing, pairs, triplets, bounds, padding and bootstrapping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge_doctor.findings import Finding
from forge_doctor.free_output import changed
from forge_doctor.patient import Patient, tensors, with_rows
from forge_doctor.probes.graph import leaves
from forge_doctor.watch import REGRESSION, LossCall, StepWatch, origin, outermost_calls

SCALES = (10.0, 100.0)
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


def contrast(patient: Patient) -> Iterator[Finding]:
    """Scores of each sample with each: row i belongs to column i, not all rows to one column."""
    size = batch_size(patient.batches[0])
    if size is None or size < 6:
        return
    for call in patient.watched.losses:
        x, y = call.input, call.target
        if call.name != "cross_entropy" or not isinstance(x, Tensor) or not isinstance(y, Tensor):
            continue
        is_square = tuple(x.shape) == (size, size) and tuple(y.shape) == (size,) and not y.is_floating_point()
        if is_square and bool((y == y[0]).all()) and _is_a_product(x) and _follows_the_batch(patient, size):
            yield Finding(
                "contrastive_labels",
                f"{call.name} gets the scores of {size} samples with each other, and the label {int(y[0])} for every "
                "row: all are told to match one sample.",
                call.where,
                {"label": int(y[0]), "size": size},
            )
            return


def _is_a_product(x: Tensor) -> bool:
    """Whether scores are a product of two matrices, at most scaled."""
    node = x.grad_fn
    while node is not None:
        name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        if name in ("Mm", "Bmm"):
            return True
        if name not in ("Mul", "Div", "T", "Transpose", "ToCopy"):
            return False
        node = next((child for child, _ in node.next_functions if child is not None), None)
    return False


def _follows_the_batch(patient: Patient, size: int) -> bool:
    """Whether half of the batch gives scores with half as many columns."""
    half = size // 2
    watch = StepWatch(half)
    with suppress(Exception), watch:
        patient.run(patient.clone(), with_rows(patient.batches[0], size, lambda x: x[:half]))
    return any(isinstance(call.input, Tensor) and tuple(call.input.shape) == (half, half) for call in watch.losses)


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
            other = _argument(patient, where, changed(batch, place, lambda x: x.roll(1, 0)), key)
            if base is None or other is None or not torch.equal(base, other):
                found.append(place)
    return found


def _argument(patient: Patient, where: str, batch: Any, key: str) -> Tensor | None:
    watch = StepWatch(batch_size(batch))
    with torch.no_grad(), watch:
        patient.run(patient.clone().eval(), batch)
    return next((call.given[key] for call in watch.losses if call.where == where and key in call.given), None)


def bounds(patient: Patient) -> Iterator[Finding]:
    """Scores that stay small however large the weights are: even the best of them leave a high loss."""
    plain = [call for call in patient.watched.losses if call.name == "cross_entropy" and _has_classes(call)]
    if not plain or not _has_classes(plain[0]):
        return
    largest = [_largest(patient, scale) for scale in (1.0, *SCALES)]
    if any(found is None for found in largest):
        return
    sizes = [float(found or 0.0) for found in largest]
    bound, classes = 1.5 * max(sizes), int(plain[0].input.shape[1])
    if min(sizes) <= 0 or max(sizes) > 2 * min(sizes) or origin(plain[0].input) in ("Softmax", "Sigmoid", "Relu"):
        return
    best = math.log1p((classes - 1) * math.exp(-2 * bound))
    if best > 0.8 * math.log(classes):
        yield Finding(
            "bounded_logits",
            f"The scores of cross_entropy stay within {max(sizes):.2g} of 0 when weights are 100 times as large: the "
            f"loss cannot fall below about {best:.3g}, of ln({classes}) = {math.log(classes):.3g}.",
            plain[0].where,
            {"bound": max(sizes), "best": best},
        )


def _has_classes(call: LossCall) -> bool:
    x, y = call.input, call.target
    fits = isinstance(x, Tensor) and isinstance(y, Tensor) and not y.is_floating_point()
    return fits and x.ndim > 1 and x.shape[1] > 2 and x.requires_grad


def _largest(patient: Patient, scale: float) -> float | None:
    """The largest score of the first loss of classes, with weights that are `scale` times as large."""
    task = patient.clone()
    with torch.no_grad():
        for p in task.parameters():
            p.mul_(scale)
    watch = StepWatch(batch_size(patient.batches[0]))
    with watch:
        patient.run(task, patient.batches[0])
    scores = next((call.input for call in watch.losses if call.name == "cross_entropy"), None)
    if not isinstance(scores, Tensor) or not bool(torch.isfinite(scores).all()):
        return None
    return float(scores.abs().max())


def padded_numbers(patient: Patient) -> Iterator[Finding]:
    """Steps of zeros at the ends of rows that count in a loss of regression."""
    given = tensors(patient.batches[0])
    for call in patient.watched.losses:
        x, y = call.input, call.target
        if call.name not in REGRESSION or call.given.get("reduction") == "none" or not isinstance(y, Tensor):
            continue
        if not isinstance(x, Tensor) or x.shape != y.shape or y.ndim < 2 or y.shape[1] < 4 or y.requires_grad:
            continue
        runs = _trailing_zeros(y)
        padded = runs > 0
        if float(padded.float().mean()) < 0.4 or len(runs.unique()) < 3 or bool((runs == y.shape[1]).all()):
            continue
        ends = torch.arange(y.shape[1], device=y.device) >= (y.shape[1] - runs).unsqueeze(1)
        if not bool((x.detach()[ends] != 0).any()) or not any(_says(z, runs, y) for z in given if z is not y):
            continue
        share = float(ends.float().mean())
        if share > 0.05:
            yield Finding(
                "padding_in_loss",
                f"{share:.0%} of the steps of {call.name} are zeros at the ends of rows of different lengths, in "
                "inputs and targets: this looks like padding, and it counts.",
                call.where,
                {"share": share},
                cure="Mask the padded steps out of the mean.",
            )
            return


def _trailing_zeros(x: Tensor) -> Tensor:
    """How many steps at the end of each row are all zeros."""
    zero = (x == 0).flatten(2).all(-1) if x.ndim > 2 else x == 0
    return zero.flip(1).long().cumprod(1).sum(1)


def _says(z: Tensor, runs: Tensor, y: Tensor) -> bool:
    """Whether another tensor of the batch is padded in the same way, or holds the lengths."""
    if not z.ndim or len(z) != len(y):
        return False
    if z.ndim == 1 and not z.is_floating_point():
        return float((z == y.shape[1] - runs).float().mean()) > 0.9
    if z.ndim < 2 or z.shape[1] != y.shape[1] or torch.equal(z, y):
        return False
    return float((_trailing_zeros(z) == runs).float().mean()) > 0.9


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
            other = _pairs_of(patient, changed(patient.batches[0], place, lambda x: x.roll(1, 0)))
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
