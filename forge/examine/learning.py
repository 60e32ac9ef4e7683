"""Learning: train on one batch again and again, with its labels and with shuffled ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.diagnose.patient import Patient, first, loss_of
from forge.diagnose.probes import motion
from forge.engine.trainer import Plugins, Trainer
from forge.examine.report import DoctorReport
from forge.optim.optimizers import Optimizers

LEFT_OUT = frozenset({"anomaly", "checkpoint", "early_stop", "guard"})
"""What plugins that the examination leaves out provide: they save, or stop the run."""


def is_left_out(plugin: Plugin) -> bool:
    """Return whether an examination leaves a plugin out. One that builds loaders stays."""
    only_looks = plugin.observer and getattr(plugin, "forge_build_loader", None) is None
    saves = getattr(plugin, "forge_save", None) is not None
    return only_looks or saves or bool(LEFT_OUT & set(plugin.provides))


class OneBatch(Plugin):
    """Trains on one batch at the optimizer's own rate, and keeps the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "forge.examine.one_batch"
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
    """Train on the first batch, and on it with shuffled labels."""
    if not patient.is_supervised:
        return
    batch = first(patient.train, 1)[0]
    try:
        patient.overfitted = _losses(make(), batch, plugins, settings, updates)
        shuffled = _shuffled(patient, batch)
        if shuffled is not None:
            patient.overfitted_shuffled = _losses(make(), shuffled, plugins, settings, updates)
    except Exception as error:
        report.skipped["learning one batch"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return
    found = [*motion.one_batch(patient), *motion.shuffled_labels(patient)]
    report.findings.extend(found)
    if not found:
        report.good.append("learning one batch")


def _losses(task: TaskModule, batch: Any, plugins: Plugins, settings: dict[str, Any], updates: int) -> list[float]:
    keeper = OneBatch()
    options = {**settings, "max_updates": updates, "max_epochs": None}
    trainer = Trainer(plugins=plugins if "recipe" not in settings else plugins or None, **options)
    for plugin in [plugin for plugin in trainer.stack if is_left_out(plugin) or plugin.name == "schedule"]:
        trainer.stack.remove(plugin.name)
    trainer.stack.add(keeper)
    trainer.fit(task, [copy.deepcopy(batch) for _ in range(updates)])
    return keeper.losses


def _shuffled(patient: Patient, batch: Any) -> Any:
    """The batch with the labels of its samples exchanged; None where no tensor of it is the labels."""
    place = patient.label_position
    if place is None:
        return None
    leaves, shape = pytree.tree_flatten(batch)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    labels = leaves[tensors[place]]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    leaves[tensors[place]] = labels[order.to(labels.device)]
    return pytree.tree_unflatten(leaves, shape)
