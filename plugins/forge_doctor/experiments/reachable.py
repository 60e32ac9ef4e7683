"""Reachable: let the last layers give any answer: the loss must come near its minimum there, and metrics to their best.

Three losses tell most of it: the lowest that any answers reach, the lowest of one answer for all samples (chance), and
that of the untrained model.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge.runs.directions import mode_of
from forge_doctor.experiments.answers import Answers, held_of, validated
from forge_doctor.experiments.intervene import apart
from forge_doctor.experiments.reading import sides
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient
from forge_doctor.probes.graph import nodes
from forge_doctor.watch import VIEWS

HIGH, LOW, MANY = 0.4, 0.1, 0.1
"""The share of the loss by chance that the best answers may leave, where it is not the targets that keep it up; that
from which answers are looked at one by one, and the share of them that may stand where the loss does not see them."""
ALIKE = 0.99
"""The share of the loss by chance from which the best answers are no better than one answer for all samples."""
ROLLS = 9
"""Rolls of the best answers, less one, that say what a metric is for wrong ones."""
NEAR = 0.05
"""The share of the untrained loss below which answers are right."""
FAR, LARGE = 3.0, 10.0
"""How many times the loss by chance, above which an untrained model is confidently wrong, and a warning is due."""


def bounds(patient: Patient) -> Iterator[Finding]:
    """Minimise the loss over the answers themselves, and over one answer for all samples."""
    held, size = held_of(patient, patient.batches[0]), batch_size(patient.batches[0])
    if held is None or size is None or size < 4:
        return
    floor, best = held.best()
    constant, _ = held.best(constant=True)
    if not all(map(math.isfinite, (floor, constant))) or constant < 0 or floor < -1e-3:
        return
    is_seen = all(bool((x != 0).reshape(len(x), -1).any(1).float().mean() > 1 - MANY) for x in held.slopes() if x.ndim)
    told = [y for y in sides(held)[1] if bool((y != y.flatten()[0]).any())] if constant < 1e-3 * held.loss else []
    if told and floor >= constant - 1e-6:
        yield Finding(
            "loss_floor",
            f"One answer of {', '.join(held.paths[-2:])} for all samples has the lowest loss, {constant:.2g}, though "
            "their targets differ: samples of some targets are left out, or count for nothing.",
            held.paths[-1],
            {"constant": constant, "untrained": held.loss},
            cure="Look at which values the loss takes for targets: -1 and 1, or 0 and 1; and at masks.",
        )
    elif floor > ALIKE * constant > 1e-3 and is_seen:
        yield Finding(
            "loss_floor",
            f"No answers of {', '.join(held.paths[-2:])} have a lower loss than one answer for all samples "
            f"({floor:.4g} and {constant:.4g}): the loss does not ask which sample is which, and a model that tells "
            "them apart is no better.",
            held.paths[-1],
            {"lowest": floor, "constant": constant, "untrained": held.loss},
            cure="Look at what the loss compares with what: shapes, masks, and the pairs that it should tell apart.",
        )
    elif constant < 1e-3 * held.loss:
        pass  # what is left of it is rounding
    elif floor > HIGH * constant and _is_bounded(held, best, floor):
        yield Finding(
            "loss_floor",
            f"Whatever {', '.join(held.paths[-2:])} gives, the loss stays above {floor:.3g}; one answer for all "
            f"samples reaches {constant:.3g}. Between the answers and the loss stand {_ways(held)}: they keep the "
            "answers from where the loss is low.",
            held.paths[-1],
            {"lowest": floor, "constant": constant, "untrained": held.loss},
        )
    elif floor > LOW * constant and (stuck := _stuck(held, best)) is not None:
        yield Finding(
            "loss_floor",
            f"Whatever the layers give, the loss stays above {floor:.3g}; one answer for all samples reaches "
            f"{constant:.3g}. {stuck[1]:.0%} of the answers of {stuck[0]} end where the loss does not see them: an "
            "activation or a clamp between them and the loss keeps them from their targets.",
            stuck[0],
            {"lowest": floor, "constant": constant, "not seen": stuck[1]},
        )
    nothing = held.value_at([torch.zeros_like(x) for x in held.values])
    if held.loss > FAR * max(constant, nothing) and nothing > 1e-3:
        text = (
            f"The first loss is {held.loss:.4g}; answers of 0 give {nothing:.4g}, and one answer for all samples "
            f"reaches {constant:.4g}: the untrained model is confidently wrong."
        )
        is_large = held.loss > LARGE * max(constant, nothing) + 10
        evidence = {"loss": held.loss, "zeros": nothing, "constant": constant}
        yield Finding("initial_loss", text, held.paths[-1], evidence, level="" if is_large else "note")


def _is_bounded(held: Answers, best: list[Tensor], floor: float) -> bool:
    """Whether larger answers in the same direction are as good: the end is that of a range, not of the targets."""
    farther = held.value_at([x + (x - y) for x, y in zip(best, held.values, strict=True)])
    return abs(farther - floor) <= 0.02 * abs(floor)


def _stuck(held: Answers, best: list[Tensor]) -> tuple[str, float] | None:
    """The layer of which most of the best answers stand on a plain: a step on changes no loss; and how many."""
    found, slopes, first = list[tuple[float, str]](), held.slopes(best), held.slopes()
    for i, (place, x) in enumerate(zip(held.given, best, strict=True)):
        spread = max(float(x.float().std()) if x.numel() > 1 else 0.0, 0.3)
        for step in (-spread, spread):
            beyond = held.slopes([y + step if i == j else y for j, y in enumerate(best)])[i]
            stands = (slopes[i] == 0) & (beyond == 0) & (first[i] != 0)  # others are masked: the loss never sees them
            found.append((float(stands.float().mean()), place[0]))
    share, path = max(found)
    return (path, share) if MANY < share < 1 else None


def _ways(held: Answers) -> str:
    """The operations between answers and a loss, from the answers on, each once."""
    free = [x.detach().clone().requires_grad_() for x in held.values]
    kinds = (type(node).__name__.rstrip("0123456789").removesuffix("Backward") for node in nodes(held.loss_at(free)))
    names = [name for name in dict.fromkeys(kinds) if name not in VIEWS and "Accumulate" not in name]
    return ", ".join(names[::-1][:6]) or "nothing"


def metrics(patient: Patient) -> Iterator[Finding]:
    """Validate the best answers, and the best answers of other samples: a metric must tell them apart, and reach its
    best."""
    batch = patient.val_batches[0] if patient.can_validate else None
    size, held = batch_size(batch), validated(patient, batch) if batch is not None else None
    own = [x.ndim > 0 and len(x) == size for x in held.values] if held is not None else []
    if held is None or size is None or size < 8 or not any(own):
        return

    def exchanged(by: int) -> list[Tensor]:
        """The best answers, each for another sample; what belongs to no sample stays, as those that all choose from."""
        return [x.roll(by, 0) if is_own else x for x, is_own in zip(best, own, strict=True)]

    floor, best = held.best()
    others = exchanged(1)
    wrong = held.value_at(others)
    if not wrong > floor + 0.1 * abs(floor) + 1e-3 or floor > 0.3 * max(held.loss, 1e-9):
        return  # the loss does not tell right from wrong here
    said = [held.metrics(values) for values in (best, others, held.values)]
    if None in said:
        return
    right, other, untrained = (x or {} for x in said)

    @functools.cache
    def wrongs() -> list[dict[str, float]]:
        """What is said of answers that are right for other samples."""
        return [held.metrics(exchanged(i)) or {} for i in range(1, min(ROLLS, size))]

    for name in right.keys() & other.keys() & untrained.keys():
        value = right[name]
        fault = _fault(name, value, other[name], untrained[name], floor < NEAR * held.loss)
        fault = fault or _no_better(name, value, [x.get(name, math.nan) for x in wrongs()])
        if "loss" in name or value != value or not fault:
            continue  # a part of the loss, or a number whose best is not known
        evidence = {"metric": name, "best": value, "others": other[name], "untrained": untrained[name]}
        yield Finding(*fault, f"{patient.place('val')}, {name}", evidence)


def _no_better(name: str, value: float, wrong: list[float]) -> tuple[str, str] | None:
    """What is wrong with a metric that moves with the answers, and is for the right ones as for any others."""
    low, high = min(wrong), max(wrong)
    spread = statistics.pstdev(wrong) if all(map(math.isfinite, wrong)) else 0.0
    if spread < 1e-6 or not low - spread / 2 <= value <= high + spread / 2:
        return None
    text = f"{name} is {value:.4g} for the best answers, and {low:.4g} to {high:.4g} for those of other samples"
    return "metric_blind", f"{text}: it does not tell which are right."


def _fault(name: str, value: float, other: float, untrained: float, is_perfect: bool) -> tuple[str, str] | None:
    """What is wrong with a metric that answers which are right, those of other samples, and untrained ones have."""
    mode = mode_of(name)
    seen = f"{name} is {value:.4g} for the best answers, {other:.4g} for those of other samples"
    if mode and apart(value, other) < 1e-6:  # an error that no answer changes is a baseline's, unless it is 0
        fault = f"{seen} and {untrained:.4g} for the untrained model: it does not see which are right."
        return ("metric_blind", fault) if mode == "max" or value == untrained == 0 else None
    way = "max" if value > other else "min"
    if mode and mode != way and apart(value, other) > 0.05:
        return "metric_wrong", f"{seen}: it should be better."
    if is_perfect and mode == "min" and value > HIGH / 2 * other > 0:
        return "metric_blind", f"{seen}, though the loss is nearly 0 for them: it does not see that they are right."
    if is_perfect and mode == "max" and value > 1.01 and abs(value - 100) > 0.5 and max(other, untrained) <= 1.5:
        return "metric_wrong", f"{seen}: it should not be above 1."
    return None
