"""Checks of optimizers: they cover this task's parameters, each once, and their schedules fit the run."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from forge.contract.run import Run
from forge.contract.task import TaskModule, defines
from forge.diagnose.checks.signatures import check_signature
from forge.diagnose.checks.user_line import warn_of
from forge.errors import TaskError
from forge.optim.optimizers import OptimizerEntry, Optimizers
from forge.optim.schedule_stepping import ScheduledLR

logger = logging.getLogger("forge")


def configured(task: TaskModule) -> Any:
    """Return the result of `configure_optimizers`; refuse a task without trainable parameters."""
    if not any(parameter.requires_grad for parameter in task.parameters()):
        count = sum(1 for _ in task.parameters())
        why = f"all {count} of its parameters have requires_grad=False" if count else "it has no registered parameters"
        raise TaskError(
            f"{type(task).__name__} has nothing to train: {why}. Assign layers to attributes in __init__ "
            "(self.net = nn.Linear(...)), or unfreeze some."
        )
    return task.configure_optimizers()


def check_optimizers(optimizers: Optimizers, task: TaskModule) -> None:
    """Refuse optimizers over parameters outside the task, or over one twice, and schedules that end before the run;
    warn of trainable parameters in no optimizer, and of schedules that are never stepped."""
    check_signature(task, "train", optimizers.named)
    named = {id(parameter): name for name, parameter in task.named_parameters()}
    covered: dict[int, str | None] = {}
    for name, entry in optimizers.entries.items():
        label = f"{type(entry.optimizer).__name__}{f' {name!r}' if name else ''}"
        _refuse_foreign(entry, label, task, named)
        _refuse_twice(entry, label, named)
        if not any(p.requires_grad for p in entry.parameters) and not getattr(entry.optimizer, "trains_nothing", False):
            if name is None or not any(p.requires_grad for p in optimizers.parameters(None)):
                raise TaskError(f"{label} has no parameter that requires a gradient. Leave it out, or unfreeze some.")
            _warn(task, f"{label} has no parameter that requires a gradient: it does nothing until one does.")
        shared = [p for p in entry.parameters if id(p) in covered]
        if shared:
            also = covered[id(shared[0])]
            logger.info("%s and %r both have %s: each steps them.", label, also, _names(shared, named))
        covered |= {id(p): name for p in entry.parameters}
        _warn_of_dropped_schedule(entry, label, task)
        for schedule in entry.schedules:
            _refuse_short_schedule(schedule, name, label, task)
    orphans = {name: p for name, p in task.named_parameters() if id(p) not in covered and p.requires_grad}
    optimizers.orphans = list(orphans.values())
    if orphans and not _are_copies(orphans.values(), optimizers):
        _warn(
            task,
            f"{len(orphans)} trainable parameters of {type(task).__name__} are in no optimizer and will not be "
            f"trained: {_names(orphans.values(), named)}. Add them, or set requires_grad_(False).",
            "not_in_optimizer",
        )


def _are_copies(orphans: Iterable[nn.Parameter], optimizers: Optimizers) -> bool:
    """Whether each has the values of one that is trained, as a target network or an average begins."""
    trained: dict[Any, list[nn.Parameter]] = {}
    for p in optimizers.parameters(None):
        trained.setdefault((p.shape, p.dtype, p.device), []).append(p)
    return all(
        p.ndim > 0 and any(equal(p, other) for other in trained.get((p.shape, p.dtype, p.device), ())) for p in orphans
    )


def equal(a: nn.Parameter, b: nn.Parameter) -> bool:
    """Whether two parameters have the same values; False where they cannot be read."""
    plain = type(a.data) is Tensor and type(b.data) is Tensor and not a.is_meta and not b.is_meta
    return plain and torch.equal(a.detach(), b.detach())


def _refuse_foreign(entry: OptimizerEntry, label: str, task: TaskModule, named: dict[int, str]) -> None:
    foreign = [p for p in entry.parameters if id(p) not in named]
    if foreign:
        own = len(entry.parameters) - len(foreign)
        error = TaskError(
            f"{label} has {len(entry.parameters)} parameters, but {own or 'none'} of them belong to "
            f"{type(task).__name__}. Build it from self.parameters() in configure_optimizers, after all layers."
        )
        error.finding = "not_in_optimizer"
        raise error


def _refuse_twice(entry: OptimizerEntry, label: str, named: dict[int, str]) -> None:
    seen: set[int] = set()
    twice = [p for p in entry.parameters if id(p) in seen or seen.add(id(p))]
    if twice:
        raise TaskError(
            f"{label} has {_names(twice, named)} more than once, so every update would step it as often. Pass each "
            "parameter once: self.parameters() does, even if layers share one."
        )


def _warn_of_dropped_schedule(entry: OptimizerEntry, label: str, task: TaskModule) -> None:
    """Warn of a schedule that was made and dropped: torch marks the optimizer's step. The task may step a live one."""
    optimizer = entry.optimizer
    marked = hasattr(optimizer.step, "_wrapped_by_lr_sched") and not getattr(optimizer, "_opt_called", False)
    if entry.schedules or not marked:
        return
    schedules = (item for item in gc.get_objects() if issubclass(type(item), LRScheduler))
    if not any(getattr(item, "optimizer", None) is optimizer for item in schedules):
        _warn(
            task,
            f"{type(task).__name__}.configure_optimizers made a schedule for {label} and did not return it, so it is "
            "never stepped. Return (optimizer, schedule), or (optimizer, schedule, '1 epoch') to step it per epoch.",
            "schedule_dropped",
        )


def _refuse_short_schedule(schedule: ScheduledLR, name: str | None, label: str, task: TaskModule) -> None:
    """Refuse a OneCycleLR that is shorter than the run: it would raise in the middle."""
    given = schedule.schedule
    if not isinstance(given, OneCycleLR) or task.trainer is None or given.last_epoch != 0:
        return
    steps = planned_steps(schedule, task.trainer)
    if steps is None or steps <= given.total_steps or (name is not None and defines(task, "takes_turn")):
        return
    beat = "per update" if schedule.every is None else f"every {schedule.every}"
    fix = "total_steps=self.trainer.planned_updates" if schedule.every is None else f"total_steps={steps}"
    raise TaskError(
        f"The OneCycleLR of {label} has total_steps={given.total_steps}, but this run steps it {steps} times (once "
        f"{beat}), and one step too many is an error. Write {fix}."
    )


def planned_steps(schedule: ScheduledLR, trainer: Run) -> int | None:
    """Return how often a schedule will step; None if unknown, as an owner of forge_plan_step may change windows."""
    planned, every = trainer.planned_updates, schedule.every
    if planned != trainer.max_updates and trainer.hooks.forge_plan_step != trainer.core.forge_plan_step:
        return None
    if planned is None or every is None:
        return planned
    if every.unit == "update":
        return planned // int(every.count)
    if every.unit == "epoch" and trainer.updates_per_epoch:
        return planned // trainer.updates_per_epoch // int(every.count)
    return None


def _names(parameters: Iterable[nn.Parameter], named: dict[int, str]) -> str:
    names = list(dict.fromkeys(named[id(p)] for p in parameters))
    return f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"


def _warn(task: TaskModule, message: str, finding: str = "") -> None:
    if finding not in task.expected:
        warn_of(task.configure_optimizers, message, finding)
