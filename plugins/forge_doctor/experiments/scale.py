"""Scale: short fits of copies: does a small step lower the loss, do metrics follow it, is the rate in its range?"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from forge.contract.task import TaskModule
from forge.data.accumulation_windows import batch_size
from forge.torch_internals import pytree
from forge_doctor.experiments.answers import answers
from forge_doctor.experiments.intervene import exchanged, numbers, parts, says
from forge_doctor.experiments.reading import read
from forge_doctor.findings import Finding
from forge_doctor.patient import OutOfTime, Patient, first, like
from forge_doctor.trial import Variation, fit

UPDATES = 40
ROUNDS, MOST_BATCHES = (100, 500), 60
"""Updates of a fit that must hold for other samples, more where the first do not teach enough; and its batches."""
LEARNT = 0.15
"""The share of the loss of held-out samples that a fit takes away which has learnt enough to be compared."""
PAIRED, MOST_GAINED = 0.02, 0.5
"""The share by which pairs must be better than pairs of others, where samples hold what belongs together, and the share
of the loss from which it is plain that they are."""
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


def _begun(patient: Patient) -> TaskModule:
    """The task before any update, as a short fit begins with it, in the modes in which it is trained."""
    task = patient.fresh()
    task.trainer = patient.trainer
    return like(task, patient.task)


def small_step(patient: Patient) -> Iterator[Finding]:
    """A step that is small enough must lower the loss of its own batch."""
    if len(patient.names) > 1:
        return
    batch = patient.batches[0]
    first = _begun(patient)
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
    start = dict(_begun(patient).named_parameters())
    ends = [dict(short_fit(patient, served, decays=on)[0].named_parameters()) for on in (True, False)]
    by_decay = by_loss = 0.0
    for name, begun in start.items():
        free = ends[1][name] - begun
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


def generalises(patient: Patient) -> Iterator[Finding]:
    """Train on some batches of train: others of train that were held out must not be much easier than those of val."""
    if not patient.can_validate or len(patient.names) > 1:
        return
    served = patient.trainer.env.move(first(patient.train, MOST_BATCHES))
    held = max(1, len(served) // 5)
    if len(served) < 5:
        return
    kept, given = served[-held:], served[:-held]
    with suppress(Exception):  # validation may take other batches
        before = [_validated(patient, _begun(patient), batches) for batches in (kept, patient.val_batches)]
        updates, task, after, learnt = _taught(patient, given, kept, before)
        yield from _judged(patient, task, given, kept, updates, before, after, learnt)


def _taught(
    patient: Patient, given: list[Any], kept: list[Any], before: list[float]
) -> tuple[int, TaskModule, list[float], float]:
    """Train until enough is learnt of what was held out: how many updates, the task, its losses there, and the share
    of the loss of training that is gone."""
    for updates in ROUNDS:
        task, losses = short_fit(patient, [given[i % len(given)] for i in range(updates)])
        first, last = (sum(part) / len(given) for part in (losses[: len(given)], losses[-len(given) :]))
        after = [_validated(patient, task, batches) for batches in (kept, patient.val_batches)]
        learnt = (first - last) / max(abs(first), 1e-12)
        gained = before[0] - after[0] > LEARNT * abs(before[0]) and (patient.is_supervised or learnt > LEARNT)
        if gained or updates == ROUNDS[-1]:
            return updates, task, after, learnt
    raise AssertionError


def _judged(
    patient: Patient,
    task: TaskModule,
    given: list[Any],
    kept: list[Any],
    updates: int,
    before: list[float],
    after: list[float],
    learnt: float,
) -> Iterator[Finding]:
    gains = [(b - a) / abs(b) for b, a in zip(before, after, strict=True)]
    predicts = read(patient, patient.batches[0]) is not None  # otherwise answers are more than predictions
    alike = _constant(patient, task, kept[:8]) if predicts else None
    if patient.is_supervised and (gains[0] < 0.01 or (alike is not None and alike[0] > alike[1])):
        best = "" if alike is None else f"; one answer for all of these samples reaches {alike[1]:.4g}"
        text = (
            f"{updates} updates on other batches of train take the loss of held-out ones from {before[0]:.4g} to "
            f"{after[0]:.4g}{best}: nothing else that holds for them was learnt."
        )
        yield Finding("labels_no_easier", text, "train", {"before": before[0], "after": after[0]})
    elif (
        not patient.is_supervised and learnt > LEARNT and gains[0] < MOST_GAINED and (pairs := _parted(patient, given))
    ):
        own, others = (_lowest(patient, batches, kept) for batches in (given, pairs))
        held = answers(patient, kept[0])
        if own > (1 - PAIRED) * others and held is not None and own >= held.best(constant=True)[0]:
            text = (
                f"Up to {updates} updates take the loss of batches that were held out from {before[0]:.4g} to "
                f"{own:.4g}, and to {others:.4g} where one tensor of each batch was exchanged between samples: what "
                "stands together in a sample says no more of others than what does not."
            )
            evidence = {"before": before[0], "after": own, "exchanged": others}
            yield Finding("labels_no_easier", text, "train", evidence)
    elif gains[0] > LEARNT and gains[1] < 0.1 * gains[0] and after[1] - after[0] > 0.5 * (before[0] - after[0]):
        yield Finding(
            "splits_disagree",
            f"{updates} updates take the validation loss of batches of train that were held out from {before[0]:.4g} "
            f"to {after[0]:.4g}, and that of val from {before[1]:.4g} to {after[1]:.4g}: what holds for train "
            "does not hold for val. Labels, words, columns or scales are encoded in another way there.",
            "val",
            {"train, held out": [before[0], after[0]], "val": [before[1], after[1]]},
        )


def _parted(patient: Patient, given: list[Any]) -> list[Any]:
    """Batches of which a tensor that counts belongs to other samples; none where no two tensors have their size."""

    def parted(batch: Any) -> Any:
        size = batch_size(batch)
        whole = [x for x in parts(batch).values() if x.ndim and len(x) == size]
        other = (exchanged(batch, x, lambda x: x.roll(1, 0)) for x in whole)
        base = says(patient, batch, "train")
        return next((x for x in other if says(patient, x, "train") != base), None) if len(whole) > 1 else None

    found = [parted(batch) for batch in given]
    return [] if any(batch is None for batch in found) else found


def _lowest(patient: Patient, given: list[Any], kept: list[Any]) -> float:
    """The lowest loss of what was held out, after some updates and after many: many learn by heart."""
    fits = (short_fit(patient, [given[i % len(given)] for i in range(updates)])[0] for updates in ROUNDS)
    return min(_validated(patient, task, kept) for task in fits)


def _constant(patient: Patient, task: TaskModule, batches: list[Any]) -> tuple[float, float] | None:
    """The training loss of some batches together, in evaluation mode, and the lowest of one answer for all samples."""
    with suppress(Exception):  # batches that cannot be put together
        whole = pytree.tree_map(lambda *given: torch.cat(given) if isinstance(given[0], Tensor) else given[0], *batches)
        held = answers(patient, whole)
        reached = float(patient.loss(task.eval(), whole).detach())
        return (reached, held.best(constant=True)[0]) if held is not None else None
    return None


def _validated(patient: Patient, task: TaskModule, batches: list[Any]) -> float:
    """The loss of validation over a few batches; that of training, in evaluation mode, where it returns none."""
    task.trainer = patient.trainer
    task.eval()
    with torch.no_grad():
        found = [
            numbers(patient.run(task, batch, "val")).get("loss") or float(patient.loss(task, batch))
            for batch in batches[:4]
        ]
    return sum(found) / len(found)
