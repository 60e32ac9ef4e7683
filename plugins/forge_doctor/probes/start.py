"""Probes of the start: the first loss, activations, layers, options of the optimizer, and the planned schedule."""

from __future__ import annotations

import copy
import functools
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LRScheduler, ReduceLROnPlateau

from forge.contract.run import Run
from forge.diagnose.checks.optimizers import planned_steps
from forge.diagnose.checks.task import near_misses
from forge.torch_internals import BatchNorm
from forge.util.tracebacks import is_users
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, named
from forge_doctor.probes.graph import DROPOUTS

FEWEST_STEPS, MOST_STEPS = 8, 50_000
"""Steps of a schedule that are rehearsed; a run of fewer updates is a trial, as with --smoke."""
LATER = 1000
"""Steps behind the end of the planned run to which a schedule is rehearsed."""
SOONER = "Step it after every update, (optimizer, schedule), or let it rise within this run."


HARDLY = 0.1
"""The share of an optimizer's own rate that a schedule must reach."""
LAST_BATCH = 0.8
"""The momentum of batch normalisation from which one batch makes most of the statistics."""


def activations(patient: Patient) -> Iterator[Finding]:
    """Units that are never active, and units at their ends."""
    rounds = patient.activity
    if len({len(calls) for calls in rounds}) != 1:
        return
    dead: list[Tensor] = []
    first_line = ""
    for calls in zip(*rounds, strict=True):
        kind, line = calls[0][:2]
        noted = [x for _, _, x in calls]
        if kind == "relu" and len({x.shape for x in noted}) == 1:
            first_line = first_line or line
            dead.append(torch.stack(noted).all(0).float())
        elif kind != "relu" and (share := float(torch.stack(noted).mean())) > 0.8:
            text = f"{share:.0%} of the outputs of {kind} are at its ends, at the start."
            yield Finding("saturated", text, line, {"share": share})
            return
    units = torch.cat(dead) if dead else torch.zeros(0)
    if units.numel() >= 4 and float(units.mean()) > 0.5:
        text = (
            f"{float(units.mean()):.0%} of {units.numel()} units behind ReLUs are 0 for every input of {len(rounds)} "
            "batches, at the start."
        )
        yield Finding("dead_units", text, first_line, {"share": float(units.mean()), "units": units.numel()})


def layers(patient: Patient) -> Iterator[Finding]:
    """Options of layers that are nearly always mistakes."""
    fixed = False
    for path, module in patient.task.named_modules():
        if isinstance(module, DROPOUTS) and module.p > 0.8:
            yield Finding("dropout_rate", f"{path} drops {module.p:.0%} of its inputs.", path, {"p": module.p})
        if isinstance(module, BatchNorm) and _is_fixed(module, patient.trainer.planned_updates or 1000) and not fixed:
            fixed = True  # the others are made alike
            momentum = float(getattr(module, "momentum", None) or 0)
            kept = "hardly change in this run" if momentum < LAST_BATCH else "are those of the last batch, nearly alone"
            text = f"{path} has momentum={momentum:g}: the statistics that evaluation uses {kept}."
            yield Finding("batch_norm_momentum", text, path, {"momentum": momentum})


def _is_fixed(norm: Any, updates: int) -> bool:
    """Whether most of the statistics of a layer that trains are still those of its begin when the run ends."""
    momentum = norm.momentum
    trains = norm.track_running_stats and any(p.requires_grad for p in norm.parameters())
    return (
        trains
        and momentum is not None
        and (momentum >= LAST_BATCH or (momentum < 0.05 and (1 - momentum) ** updates > 0.5))
    )


def optimizer(patient: Patient) -> Iterator[Finding]:
    """Options of the optimizers."""
    for entry in patient.trainer.optimizers.entries.values():
        kind = type(entry.optimizer).__name__
        for number, group in enumerate(entry.optimizer.param_groups):
            place = f"{kind}, group {number}"
            betas = group.get("betas")
            if betas is not None and float(betas[0]) > float(betas[1]):
                yield Finding("optimizer_options", f"{place} has betas={tuple(betas)}: swapped?", place)
            if lost := lost_eps(group):
                cure = "Keep weights in float32; -p amp computes in half precision."
                yield Finding("optimizer_options", f"{place} has {lost}: updates divide by 0.", place, cure=cure)
            if float(group.get("eps") or 0) >= 1e-2:
                yield Finding("optimizer_options", f"{place} has eps={group['eps']:g}: it damps every update.", place)
            momentum = float(group.get("momentum") or 0)
            if momentum >= 0.995:
                span = 1 / max(1e-6, 1 - momentum)
                text = f"{place} has momentum={momentum:g}: it averages over {span:.0f} updates."
                yield Finding("optimizer_options", text, place)


def lost_eps(group: dict[str, Any]) -> str:
    """Say that eps is 0 in the type of a group's weights; "" if it is not."""
    eps, kinds = float(group.get("eps") or 0), {p.dtype for p in group["params"]}
    lost = [kind for kind in kinds if kind.is_floating_point and eps and not float(torch.tensor(eps, dtype=kind))]
    return f"eps={eps:g}, which is 0 in {str(lost[0]).removeprefix('torch.')}" if lost else ""


def schedules(patient: Patient) -> Iterator[Finding]:
    """Rehearse each schedule over the planned run."""
    if (patient.trainer.planned_updates or MOST_STEPS) < FEWEST_STEPS:
        return
    for entry in patient.trainer.optimizers.entries.values():
        for scheduled in entry.schedules:
            steps = planned_steps(scheduled, patient.trainer)
            if steps is None or not 0 < steps <= MOST_STEPS or isinstance(scheduled.schedule, ReduceLROnPlateau):
                continue
            if not patient.reads and calls_users(scheduled.schedule):
                continue
            rates = rehearse(entry.optimizer, scheduled.schedule, steps)
            kind = type(scheduled.schedule).__name__
            found = list(_rehearsed(patient, scheduled, rates, kind, entry.optimizer)) if steps >= FEWEST_STEPS else []
            yield from found or _never_reached(entry.optimizer, scheduled, rates, kind)


def _rehearsed(patient: Patient, scheduled: Any, rates: list[float], kind: str, optimizer: Any) -> Iterator[Finding]:
    epoch, steps = patient.trainer.updates_per_epoch if scheduled.every is None else None, len(rates)
    if rates and epoch is not None and ends_within(rates, epoch):
        text = f"{kind} has done all that it does within the first epoch, of {epoch} of {steps} updates."
        yield Finding("schedule_spent", text, kind, {"steps": steps, "epoch": epoch, "last": rates[-1]})
    elif rates:
        found = list(judge(rates, kind, isinstance(scheduled.schedule, (CosineAnnealingWarmRestarts, CyclicLR))))
        yield from found or _far_below(optimizer, rates, kind)


def _far_below(optimizer: Any, rates: list[float], kind: str) -> Iterator[Finding]:
    """A schedule gives shares of the rate that the optimizer was made with, and comes near all of it at some time."""
    own = max(float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups)
    if 0 < max(rates) < HARDLY * own:
        text = (
            f"{kind} takes at most {max(rates) / own:.2g} of the rate that the optimizer was made with, {own:g}: the "
            f"highest rate of {len(rates)} steps is {max(rates):.2g}."
        )
        cure = "Return a factor from the schedule, not a rate: LambdaLR multiplies by what it gets."
        yield Finding("schedule_still", text, kind, {"highest": max(rates), "own": own}, cure=cure)


def _never_reached(optimizer: Any, scheduled: Any, rates: list[float], kind: str) -> Iterator[Finding]:
    """Rehearse far beyond the plan: most of the way up must lie within it."""
    with suppress(Exception):  # one that ends
        later = rehearse(optimizer, scheduled.schedule, 20 * len(rates) + LATER)
        if 0 < max(rates) < 0.25 * max(later) and len(rates) < 0.25 * later.index(max(later)):
            text = (
                f"{kind} reaches {max(rates):.2g}: it would reach {max(later):.2g} after {later.index(max(later))} "
                f"steps, and this run takes {len(rates)}, one every {scheduled.every or 'update'}."
            )
            yield Finding("schedule_still", text, kind, {"highest": max(rates), "later": max(later)}, cure=SOONER)


def ends_within(rates: list[float], epoch: int) -> bool:
    """Whether the rate falls to less than half of its peak within the first of several epochs, and then stays."""
    changes = [i for i in range(1, len(rates)) if rates[i] != rates[i - 1]]
    return len(rates) >= 3 * epoch and bool(changes) and changes[-1] < epoch and rates[-1] < 0.5 * max(rates)


def calls_users(value: Any) -> bool:
    """Whether a schedule, or what it holds, is the user's, so that a rehearsal would call his code."""
    if isinstance(value, (list, tuple)):
        return any(map(calls_users, value))
    if isinstance(value, functools.partial):
        return calls_users(value.func)
    if not callable(value) and not isinstance(value, (LRScheduler, Optimizer)):
        return False
    module = sys.modules.get(value.__module__)
    is_own = is_users(getattr(module, "__file__", None) or "")
    return is_own or (isinstance(value, LRScheduler) and any(map(calls_users, vars(value).values())))


def rehearse(optimizer: Any, schedule: Any, steps: int) -> list[float]:
    """The largest rate of an optimizer at each step, on a copy that shares its parameters."""
    memo = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    twin, plan = copy.deepcopy((optimizer, schedule), memo)
    rates = []
    with warnings.catch_warnings(action="ignore"):  # the copy's optimizer takes no steps, of which torch warns
        for _ in range(steps):
            rates.append(max(float(group["lr"]) for group in twin.param_groups))
            plan.step()
    return rates


def headroom(trainer: Run, reads: bool = True) -> float:
    """How many times the present rates the schedule's highest is; without end where only the user's code knows it, and
    is not called."""
    best = 1.0
    for entry in trainer.optimizers.entries.values():
        now = max((float(group.get("lr", 0.0)) for group in entry.optimizer.param_groups), default=0.0)
        for scheduled in entry.schedules:
            if not reads and calls_users(scheduled.schedule):
                return math.inf
            try:
                peak = max(rehearse(entry.optimizer, scheduled.schedule, 1000))
            except Exception:  # one that needs a metric, or ends
                continue
            best = max(best, peak / now if now > 0 else 1e6)
        if any(float(group.get("initial_lr", 0)) > now for group in entry.optimizer.param_groups):
            best = max(best, 1e6 if now <= 0 else best)
    return best


def judge(rates: list[float], kind: str, cycles: bool) -> Iterator[Finding]:
    peak, steps = max(rates), len(rates)
    evidence = {"steps": steps, "first": rates[0], "highest": peak, "last": rates[-1]}
    if peak <= 0:
        yield Finding("schedule_zero", f"{kind} gives a rate of 0 in all of {steps} steps.", kind, evidence)
        return
    idle = next(i for i, rate in enumerate(rates) if rate > 1e-4 * peak)
    if idle > max(3, 0.05 * steps):
        text = f"{kind} gives a rate of 0 in the first {idle} of {steps} steps."
        yield Finding("schedule_zero", text, kind, evidence)
        return
    spent = next((i for i in range(steps) if max(rates[i:]) < 0.01 * peak), steps)
    if spent < 0.35 * steps:
        text = f"{kind} is below 1 % of its peak after {spent} of {steps} steps: the rest of the run hardly trains."
        yield Finding("schedule_spent", text, kind, {**evidence, "spent": spent})
        return
    if not cycles and _rises(rates, peak) > 0 and _turns_back(rates, peak):
        text = f"{kind} falls and rises again {_rises(rates, peak)} times in {steps} steps."
        yield Finding("schedule_rises", text, kind, evidence)
    elif rates.index(peak) >= 0.9 * steps and rates[0] < 0.9 * peak:
        text = f"{kind} still rises at the end of {steps} steps: the peak is never used."
        yield Finding("schedule_still", text, kind, evidence)
    elif (peak - min(rates)) < 0.02 * peak and steps >= 10:
        yield Finding("schedule_still", f"{kind} changes the rate by less than 2 % in {steps} steps.", kind, evidence)


def _turns_back(rates: list[float], peak: float) -> bool:
    """Whether the rate rises as it fell, as a curve does that is followed beyond its end; otherwise it begins again."""
    low = next(i for i in range(1, len(rates) - 1) if rates[i] < 0.8 * peak and rates[i] < rates[i + 1])
    reach = min(low, len(rates) - 1 - low)
    return max(abs(rates[low + k] - rates[low - k]) for k in range(reach + 1)) < 0.1 * peak


def _rises(rates: list[float], peak: float) -> int:
    """How often a rate rises by a fifth of its peak after it fell by as much."""
    low, high, falling, count = rates[0], rates[0], False, 0
    for rate in rates:
        if falling:
            low = min(low, rate)
            if rate > low + 0.2 * peak:
                count, falling, high = count + 1, False, rate
        else:
            high = max(high, rate)
            if rate < high - 0.2 * peak:
                falling, low = True, rate
    return count


def methods(patient: Patient) -> Iterator[Finding]:
    """Methods of the task that forge never calls: their names nearly are those that it calls."""
    for kind, name, meant in near_misses(patient.task):
        text = f"forge never calls {kind.__name__}.{name}: did you mean {meant}?"
        yield Finding("method_name", text, f"{kind.__name__}.{name}")


def unequal(tensor: Tensor) -> bool:
    rows = tensor.detach().flatten(1)
    return len(rows) < 2 or bool((rows != rows[:1]).any())


def equal_rows(patient: Patient) -> Iterator[Finding]:
    """After a few updates: matrices whose rows are still equal."""
    trained = {id(p) for p in patient.trainer.optimizers.parameters(None)}
    equal = [
        name
        for name, p in patient.trainer.task.named_parameters()
        if id(p) in trained and p.ndim > 1 and len(p) > 1 and p.requires_grad and not unequal(p) and p.grad_fn is None
    ]
    moved = [name for name in equal if name in patient.moved]
    if moved:
        text = (
            f"All rows of {named(moved)} are equal, and still are after {patient.updates} updates: their units compute "
            "one thing."
        )
        yield Finding("equal_rows", text, moved[0], {"parameters": moved[:8]})
