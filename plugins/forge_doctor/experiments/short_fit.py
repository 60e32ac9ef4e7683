"""Short fits: train a copy on a few batches with its optimizers alone, at the highest rate of their schedule."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.engine.trainer import Trainer
from forge.optim.optimizers import Optimizers
from forge_doctor.patient import OutOfTime, Patient, like, loss_of


class AtOneRate(Plugin):
    """Trains without schedules, at a multiple of the optimizer's own rate.

    Ends in time, or where the loss is no number.
    """

    def __init__(self, patient: Patient) -> None:
        super().__init__()
        self.name = "forge_doctor.one_rate"
        self._last = 0.0
        self._patient = patient

    @hookimpl(wrapper=True)
    def forge_build_optimizers(self) -> Any:
        built: Optimizers = yield
        for entry in built.entries.values():
            entry.schedules.clear()
            for group in entry.optimizer.param_groups:
                if "initial_lr" in group and not isinstance(group["lr"], Tensor):
                    group["lr"] = float(group["initial_lr"])
                group["lr"] = group["lr"] * _peak(self._patient)
        built.has_schedules = False
        return built

    @hookimpl(wrapper=True)
    def forge_forward(self, step: Any, batch: Any) -> Any:
        output = yield
        self._last = float(loss_of(output).detach())
        return output

    @hookimpl
    def forge_step_end(self, step: Any) -> None:
        if not math.isfinite(self._last) or self._patient.is_out_of_time():
            step.trainer.max_updates = step.index + 1


def short_fit(patient: Patient, batches: list[Any]) -> TaskModule:
    """Return a copy that was trained on each of these batches in turn."""
    task = patient.fresh()
    given = [copy.deepcopy(batch) for batch in batches]  # a step may change it in place
    settings = {"seed": 0, "log_every": 10_000, "validate_every": None, "run_dir": False, "device": patient.device.type}
    with torch.enable_grad():
        Trainer(plugins=[AtOneRate(patient)], max_updates=len(given), **settings).fit(task, given)
    if patient.is_out_of_time():
        raise OutOfTime
    task.trainer = patient.trainer
    return task.to(patient.device)


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
