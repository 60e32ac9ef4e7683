"""Scale: short fits of copies: does a small step lower the loss, is the rate in its range, and the decay of weights?"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from forge.contract.task import TaskModule
from forge_doctor.findings import Finding
from forge_doctor.patient import OutOfTime, Patient, like
from forge_doctor.trial import Variation, fit

UPDATES = 40
DECAYS = 0.5
"""The share of what the loss moves weights by, from which their decay does too."""
SMALL_STEP = 1e-3
"""The share of the planned rate at which an update must lower the loss that it was computed from."""


def short_fit(
    patient: Patient, batches: list[Any], factor: float = 1.0, task: TaskModule | None = None, decays: bool = True
) -> tuple[TaskModule, list[float]]:
    """Train a copy, or this task, on these batches with the optimizers alone, at a multiple of the highest rate of its
    schedule; the task, and the loss of each update."""
    task = patient.fresh() if task is None else task
    settings = {"seed": 0, "log_every": 10_000, "validate_every": None, "run_dir": False, "device": patient.device.type}
    given = [copy.deepcopy(batch) for batch in batches]
    change = Variation(rate=factor * _peak(patient), decays=decays)
    losses = fit(task, given, [], settings, len(given), change, lambda losses: patient.is_out_of_time(), seeded=False)
    if patient.is_out_of_time():
        raise OutOfTime
    task.trainer = patient.trainer
    return task.to(patient.device), losses


def _peak(patient: Patient) -> float:
    """The highest rate of the schedule, as a multiple of the optimizer's own."""
    group = next(iter(patient.trainer.optimizers.entries.values())).optimizer.param_groups[0]
    own, now = float(group.get("initial_lr", group["lr"])), float(group["lr"])
    return patient.headroom * now / own if own > 0 and now > 0 and patient.headroom < 1e5 else 1.0


def begun(patient: Patient) -> TaskModule:
    """The task before any update, as a short fit begins with it, in the modes in which it is trained."""
    task = patient.fresh()
    task.trainer = patient.trainer
    return like(task, patient.task)


def small_step(patient: Patient) -> Iterator[Finding]:
    """A step that is small enough must lower the loss of its own batch."""
    if len(patient.names) > 1:
        return
    batch = patient.batches[0]
    first = begun(patient)
    before = float(patient.loss(first, batch).detach())
    falls = []
    for factor in (-SMALL_STEP, SMALL_STEP, 10 * SMALL_STEP):
        task, _ = short_fit(patient, [batch] * 3, abs(factor))
        if factor < 0:  # the same way back: at a kink both ways go up
            with torch.no_grad():
                for p, old in zip(task.parameters(), first.parameters(), strict=True):
                    p.copy_(2 * old - p)
        falls.append(before - float(patient.loss(like(task, patient.task), batch).detach()))
    back, *falls = falls
    if all(fall < -1e-7 * abs(before) for fall in falls) and falls[1] < 2 * falls[0] and back > 0:
        yield Finding(
            "step_raises_loss",
            f"Three updates at {SMALL_STEP:g} of the rate raise the loss of their own batch from {before:.6g} by "
            f"{-falls[0]:.3g}, and at ten times that by {-falls[1]:.3g}: the updates go uphill.",
            "configure_optimizers",
            {"loss": before, "rises": [-fall for fall in falls]},
        )


def rates(patient: Patient) -> Iterator[Finding]:
    """Short fits at the rate, a hundredth and a hundred times of it: it must not raise the loss, nor leave it."""
    if len(patient.names) > 1:
        return
    batches = patient.whole or patient.batches  # a rate belongs to the size of a batch
    served = [batches[i % len(batches)] for i in range(UPDATES)]
    found: dict[float, list[float]] = {}
    for factor in (1.0, 0.01, 100.0):
        with suppress(Exception):
            found[factor] = short_fit(patient, served, factor)[1]
    if len(found) < 3:
        return
    few = len(batches)  # a round over the batches
    start = sum(found[0.01][:few]) / few
    late = {factor: losses[len(losses) // 2 :] for factor, losses in found.items()}  # a low end may be chance
    at = {factor: sum(losses) / len(losses) for factor, losses in late.items()}
    if not start > 0:
        return
    fall = {factor: (start - value) / start if math.isfinite(value) else -math.inf for factor, value in at.items()}
    evidence = {"start": start, "at the rate": at[1.0], "at a hundredth": at[0.01], "at a hundred times": at[100.0]}
    planned = patient.trainer.planned_updates or 1000
    if fall[1.0] < -0.05 and fall[0.01] > 0.05:
        text = (
            f"{UPDATES} updates take the loss from {start:.4g} to {at[1.0]:.4g}; at a hundredth of the rate to "
            f"{at[0.01]:.4g}."
        )
        yield Finding("learning_rate_high", text, "configure_optimizers", evidence)
    elif abs(fall[1.0]) * max(1, planned / UPDATES) < 0.1 and abs(fall[1.0]) < 0.01 and fall[100.0] > 0.1:
        text = (
            f"{UPDATES} updates take the loss from {start:.4g} to {at[1.0]:.4g}, which is little even over {planned} "
            f"updates; at a hundred times the rate to {at[100.0]:.4g}."
        )
        yield Finding("learning_rate_low", text, "configure_optimizers", evidence)


def decay(patient: Patient) -> Iterator[Finding]:
    """Short fits with the decay of weights and without: it must not move them as much as the loss does."""
    groups = [g for entry in patient.trainer.optimizers.entries.values() for g in entry.optimizer.param_groups]
    decays = {float(group.get("weight_decay") or 0) for group in groups}
    if len(patient.names) > 1 or not any(decays):
        return
    batches = patient.whole or patient.batches
    served = [batches[i % len(batches)] for i in range(UPDATES)]
    start = dict(begun(patient).named_parameters())
    ends = [dict(short_fit(patient, served, decays=on)[0].named_parameters()) for on in (True, False)]
    by_decay = by_loss = 0.0
    for name, first in start.items():
        free = ends[1][name] - first
        is_moved = free != 0  # rows of a table that no sample reads are left to the decay
        by_loss += float(free.detach().square().sum())
        by_decay += float((ends[0][name] - ends[1][name]).detach()[is_moved].square().sum())
    share = math.sqrt(by_decay / by_loss) if by_loss > 0 else math.nan
    if share > DECAYS:
        yield Finding(
            "weight_decay",
            f"{UPDATES} updates with the weight decay of {max(decays):g} end {share:.2g} times as far from those "
            "without it as these go: it moves weights as the loss does.",
            "configure_optimizers",
            {"weight_decay": max(decays), "share": share},
        )
