"""Learning: train on one batch again and again, and on many with shuffled labels."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.engine.trainer import Plugins, Trainer
from forge.optim.optimizers import Optimizers
from forge.snapshot.left_out import SCHEDULE, is_left_out
from forge.torch_internals import pytree
from forge_doctor.patient import Patient, first, loss_of
from forge_doctor.probes import motion
from forge_doctor.report import DoctorReport


class KeepsLosses(Plugin):
    """Keeps the losses of a fit, which runs at the optimizer's own rate."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "forge_doctor.losses"
        self.losses: list[float] = []

    @hookimpl(wrapper=True)
    def forge_build_optimizers(self) -> Any:
        built: Optimizers = yield
        for entry in built.entries.values():
            entry.schedules.clear()
            for group in entry.optimizer.param_groups:
                if "initial_lr" in group and not isinstance(group["lr"], Tensor):
                    group["lr"] = float(group["initial_lr"])
        built.has_schedules = False
        return built

    @hookimpl(wrapper=True)
    def forge_forward(self, step: Any, batch: Any) -> Any:
        output = yield
        self.losses.append(float(loss_of(output).detach()))
        return output


def learn(
    patient: Patient,
    make: Callable[[], TaskModule],
    plugins: Plugins,
    settings: dict[str, Any],
    updates: int,
    report: DoctorReport,
) -> None:
    """Train on the first batch again and again; then on many batches, with their labels and with shuffled ones."""
    if not patient.is_supervised:
        return
    fit = functools.partial(_fit, plugins=plugins, settings=settings)
    served = first(patient.train, updates)
    try:
        patient.overfitted = fit(make(), [copy.deepcopy(served[0]) for _ in range(updates)])
        if patient.label_position is not None and patient.val_batches and len(served) > 4:
            for shuffled in (False, True):
                given = [_shuffled(patient, batch) if shuffled else batch for batch in served]
                task = make()
                fit(task, [copy.deepcopy(given[i % len(given)]) for i in range(updates)])
                patient.held_out.append(_held_out(patient, task))
    except Exception as error:
        report.skipped["learning one batch"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return
    found = [*motion.one_batch(patient), *motion.shuffled_labels(patient)]
    report.findings.extend(found)
    if not found:
        report.good += ["learning one batch"] + ["learning more than from shuffled labels"] * bool(patient.held_out)


def _fit(task: TaskModule, batches: list[Any], plugins: Plugins, settings: dict[str, Any]) -> list[float]:
    """Train on these batches, and return their losses."""
    keeper = KeepsLosses()
    options = {**settings, "max_updates": len(batches), "max_epochs": None}
    trainer = Trainer(plugins=plugins if "recipe" not in settings else plugins or None, **options)
    for plugin in [plugin for plugin in trainer.stack if is_left_out(plugin, SCHEDULE)]:
        trainer.stack.remove(plugin.name)
    trainer.stack.add(keeper)
    trainer.fit(task, batches)
    return keeper.losses


def _held_out(patient: Patient, task: TaskModule) -> float:
    """The loss of a trained task on the first batches of val, with their own labels."""
    task.trainer = patient.trainer
    task.eval()
    with torch.no_grad():
        losses = [float(loss_of(patient.run(task, batch))) for batch in patient.val_batches]
    return sum(losses) / len(losses)


def _shuffled(patient: Patient, batch: Any) -> Any:
    """The batch with the labels of its samples exchanged."""
    leaves, shape = pytree.tree_flatten(batch)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    place = places[patient.label_position or 0]
    order = torch.randperm(len(leaves[place]), generator=torch.Generator().manual_seed(0))
    leaves[place] = leaves[place][order.to(leaves[place].device)]
    return pytree.tree_unflatten(leaves, shape)
