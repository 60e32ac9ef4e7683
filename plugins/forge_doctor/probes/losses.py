"""Probes of losses and what they are given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge_doctor.experiments.regroup import group_of
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient
from forge_doctor.probes.graph import leaves
from forge_doctor.watch import REGRESSION, LossCall, Oddity, StepWatch, origin, origins

LOGITS = ("cross_entropy", "binary_cross_entropy_with_logits", "multilabel_soft_margin_loss")
LOGARITHMS = ("nll_loss", "kl_div")
RANGES = {"Relu": (0.0, float("inf")), "Sigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Softplus": (0.0, float("inf"))}
RANGES["Softmax"] = (0.0, 1.0)
INVERSE = 0.98
"""How well the weights of classes, in order, follow the inverse counts that they are made of."""
ASYMMETRIC = ("cross_entropy", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits", "nll_loss")


def inputs(patient: Patient) -> Iterator[Finding]:
    """What each loss of torch's is given, by how it was computed."""
    seen: set[tuple[str, str]] = set()
    for call in patient.watched.losses:
        if any(call.input is dropped for dropped in patient.watched.dropped):
            yield Finding("dropout_on_output", f"{call.name} gets the output of dropout.", call.where)
        for finding in _look(call):
            if (finding.name, finding.where) not in seen:
                seen.add((finding.name, finding.where))
                yield finding
    for odd in (*patient.watched.oddities, *_of_half(patient)):
        if (odd.kind, odd.where) not in seen:
            seen.add((odd.kind, odd.where))
            yield Finding(odd.kind, f"{odd.text}.", odd.where)


def options(patient: Patient) -> Iterator[Finding]:
    """Options and targets that are wrong whatever the model is."""
    for call in patient.watched.losses:
        smoothing = float(call.given.get("label_smoothing") or 0.0)
        if smoothing > 0.5:
            text = (
                f"{call.name} has label_smoothing={smoothing:g}: the right class gets {1 - smoothing:.0%} of the "
                "target, and all classes share the rest."
            )
            yield Finding("label_smoothing", text, call.where, {"label_smoothing": smoothing})
            return


def _of_half(patient: Patient) -> list[Oddity]:
    """What half of a batch shows: as many classes as samples hide what runs over the batch."""
    group = group_of(patient)
    if group is None or group.size < 4:
        return []
    watch = StepWatch(group.size // 2)
    with suppress(Exception), watch:  # a step that only takes whole batches
        patient.run(patient.clone(), group.take(range(group.size // 2)))
    return watch.oddities


def evaluation_inputs(patient: Patient) -> Iterator[Finding]:
    """Dimensions that an evaluation mixes up."""
    if not patient.can_validate:
        return
    watch = StepWatch(batch_size(patient.val_batches[0]))
    with torch.no_grad(), watch:
        patient.run(patient.clone().eval(), patient.val_batches[0], "val")
    yield from mixed_up(watch)


def mixed_up(watch: StepWatch) -> Iterator[Finding]:
    """The first call of a watched evaluation that mixes up dimensions."""
    for odd in watch.oddities[:1]:
        yield Finding(odd.kind, f"{odd.text}.", odd.where, level="warning")


def _look(call: LossCall) -> Iterator[Finding]:
    x, y = call.input, call.target
    if not isinstance(x, Tensor):
        return
    made = origin(x)
    if call.name in LOGITS and made in ("Softmax", "Sigmoid"):
        yield Finding(
            "activation_before_loss", f"{call.name} gets the output of {made.lower()}, and applies its own.", call.where
        )
    elif call.name in LOGARITHMS and made in ("Softmax", "Sigmoid"):
        text = f"{call.name} gets the output of {made.lower()}, but wants logarithms of probabilities."
        yield Finding("activation_before_loss", text, call.where, cure="Use log_softmax in place of softmax.")
    elif call.name == "binary_cross_entropy" and [*itertools.islice(origins(x), 2)] == ["Sigmoid", "Sigmoid"]:
        yield Finding("activation_before_loss", f"{call.name} gets the sigmoid of a sigmoid.", call.where)
    elif call.name in (*LOGITS, "nll_loss") and made == "Relu":
        yield Finding("relu_before_loss", f"{call.name} gets the output of a ReLU: no logit is negative.", call.where)
    if isinstance(y, Tensor):
        yield from _look_at_target(call, x, y, made)


def _look_at_target(call: LossCall, x: Tensor, y: Tensor, made: str) -> Iterator[Finding]:
    if call.name in ASYMMETRIC and y.requires_grad and not (call.name == "kl_div" and _is_of_the_same(x, y)):
        yield Finding("target_has_gradient", f"The target of {call.name} carries a gradient.", call.where)
    if call.name == "cross_entropy" and y.is_floating_point() and y.ndim == x.ndim and x.shape == y.shape:
        sums = y.detach().float().sum(1)
        off = float(((sums - 1).abs() > 1e-2).float().mean())
        if off > 0.02:
            text = (
                f"{off:.0%} of the targets of cross_entropy, which are probabilities of classes, do not sum to 1 (but "
                f"to {float(sums.min()):.3g} to {float(sums.max()):.3g}): several labels of one sample compete in one "
                "softmax."
            )
            yield Finding("competing_labels", text, call.where, {"share": off})
    if call.name in REGRESSION and made in RANGES and y.numel():
        low, high = RANGES[made]
        outside = float(((y < low - 1e-3) | (y > high + 1e-3)).float().mean())
        if outside > 0.02:
            yield Finding(
                "output_range",
                f"{call.name} gets predictions from {made.lower()}, which gives [{low:g}, {high:g}]; {outside:.0%} of "
                "the targets are outside.",
                call.where,
                {"outside": round(outside, 4), "lowest": float(y.min()), "highest": float(y.max())},
            )


def _is_of_the_same(x: Tensor, y: Tensor) -> bool:
    """Whether a target comes from the parameters that the prediction comes from, as two passes that are to agree."""
    return {id(leaf) for leaf in leaves(y)} <= {id(leaf) for leaf in leaves(x)}


def weights(patient: Patient) -> Iterator[Finding]:
    """Class weights against the counts of classes."""
    for call in patient.watched.losses:
        y = call.target
        weight = call.given.get("weight") if call.name in ("cross_entropy", "nll_loss") else None
        positive = call.given.get("pos_weight") if call.name == "binary_cross_entropy_with_logits" else None
        if isinstance(weight, Tensor) and isinstance(y, Tensor) and not y.is_floating_point():
            labels = patient.labels if patient.labels is not None else y.flatten()
            counts = torch.bincount(labels[labels >= 0].cpu(), minlength=len(weight)).float()[: len(weight)]
            used = counts > 0
            if int(used.sum()) > 1 and float(counts[used].max() / counts[used].min()) > 2:
                logs = [x.detach().cpu().float()[used].clamp_min(1e-9).log() for x in (weight, counts)]
                ordered = [x.sort().values for x in (logs[0], -logs[1])]
                given, best = (float(torch.corrcoef(torch.stack(x))[0, 1]) for x in (logs, ordered))
                if given > 0.5 or (given > -0.5 and best > INVERSE):
                    why = (
                        "weighs frequent classes more"
                        if given > 0.5
                        else "has weights for these counts in another order"
                    )
                    yield Finding(
                        "weights_reversed",
                        f"{call.name} {why}: counts {_short(counts)}, weights {_short(weight)}.",
                        call.where,
                        {"counts": counts.tolist()[:20], "weights": weight.tolist()[:20]},
                    )
        if isinstance(positive, Tensor) and isinstance(y, Tensor):
            share, factor = float(y.mean()), float(positive.float().mean())
            if (share < 0.35 and factor < 0.7) or (share > 0.65 and factor > 1.5):
                text = (
                    f"pos_weight is {factor:.3g}, but {share:.0%} of the labels are positive: the more frequent side "
                    "gets more weight."
                )
                yield Finding("weights_reversed", text, call.where, {"positive": share, "pos_weight": factor})


def _short(x: Tensor) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in x.flatten().tolist()[:6]) + (", ...]" if x.numel() > 6 else "]")


def reduction(patient: Patient) -> Iterator[Finding]:
    """How the loss grows with the batch: a mean does not, a sum does, and a mixture is in between."""
    group = group_of(patient)
    if group is None or group.size < 4 or len(patient.names) > 1:
        return
    half = list(range(group.size // 2))
    (a, terms_a), (b, terms_b) = (_loss_and_terms(patient, group.take(places)) for places in (half, half * 2))
    if not abs(a) > 1e-6:
        return
    ratio = b / a
    called = [call for call in patient.watched.losses if call.given.get("reduction") == "sum"]
    where = called[0].where if called else patient.place()
    if abs(ratio - 2) < 0.005:
        text = (
            f"The loss of the same samples twice is {ratio:.2f} times as large: it is a sum over the batch, so the "
            "learning rate grows with the batch size."
        )
        yield Finding("sum_reduction", text, where, {"once": a, "twice": b})
    elif len(terms_a) == len(terms_b) > 1 and abs(ratio - 1) > 0.005:  # sums of a quotient are no terms of the loss
        ratios = [y / x for (x, _), (y, _) in zip(terms_a, terms_b, strict=True) if abs(x) > 1e-6]
        sums, means = [r for r in ratios if abs(r - 2) < 0.05], [r for r in ratios if abs(r - 1) < 0.05]
        if sums and means:
            line = next(
                place for (x, place), (y, _) in zip(terms_a, terms_b, strict=True) if x and abs(y / x - 2) < 0.05
            )
            yield Finding(
                "mixed_reductions",
                "One term of the loss is a mean over the batch and another is a sum: their balance depends on the "
                "batch size.",
                line,
                {"terms": [round(x, 6) for x, _ in terms_a], "same samples twice": [round(y, 6) for y, _ in terms_b]},
            )


def _loss_and_terms(patient: Patient, batch: Any) -> tuple[float, list[tuple[float, str]]]:
    watch = StepWatch(batch_size(batch))
    with watch:
        loss = patient.loss(patient.clone(), batch)
    return float(loss.detach()), [(float(x.detach()), line) for x, line in watch.terms]
