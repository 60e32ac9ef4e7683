"""Trial: a short fit on one batch with the run's own stack, as it is or with one thing changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.data.accumulation_windows import batch_size
from forge.engine.trainer import Plugins, Trainer
from forge.optim.optimizers import Optimizers
from forge.rng import reseed
from forge.snapshot.left_out import SCHEDULE, is_left_out
from forge_doctor.experiments.intervene import with_rows_changed
from forge_doctor.patient import SEED, loss_of


@dataclass(frozen=True)
class Variation:
    """One thing that a trial does in another way than the planned run."""

    name: str = ""
    rate: float = 1.0
    "By which learning rates are multiplied."
    decays: bool = True
    edits: bool = True
    "Whether plugins edit gradients, as a clip does."
    evaluates: bool = False
    "Whether the step runs in evaluation mode."
    samples: int | None = None
    "How many samples of the batch are used."


class KeepsLosses(Plugin):
    """Keeps the loss of each update, in a fit at the optimizer's own rate that draws the same numbers every time."""

    def __init__(self, change: Variation, is_over: Callable[[list[float]], bool], seeded: bool = True) -> None:
        super().__init__()
        self.name = "forge_doctor.losses"
        self.losses: list[float] = []
        "Of each update: the sum over the optimizers, of which each counts with its last."
        self._change, self._is_over, self._seeded = change, is_over, seeded
        self._now: dict[str | None, list[float]] = {}
        self._last: dict[str | None, float] = {}

    @hookimpl(wrapper=True)
    def forge_build_optimizers(self) -> Any:
        built: Optimizers = yield
        for entry in built.entries.values():
            entry.schedules.clear()
            for group in entry.optimizer.param_groups:
                if "initial_lr" in group and not isinstance(group["lr"], Tensor):
                    group["lr"] = float(group["initial_lr"])
                group["lr"] = group["lr"] * self._change.rate
                if not self._change.decays and "weight_decay" in group:
                    group["weight_decay"] = 0.0
        built.has_schedules = False
        return built

    @hookimpl(wrapper=True)
    def forge_forward(self, step: Any, batch: Any) -> Any:
        modules = [module for module in step.trainer.task.modules() if self._change.evaluates and module.training]
        for module in modules:
            module.training = False
        if self._seeded:
            reseed(SEED)
        try:
            output = yield
        finally:
            for module in modules:
                module.training = True
        loss = loss_of(output)
        if isinstance(loss, Tensor):
            self._now.setdefault(step.name, []).append(float(loss.detach()))
        return output

    @hookimpl
    def forge_step_end(self, step: Any) -> None:
        self._last |= {name: sum(found) / len(found) for name, found in self._now.items()}
        self._now.clear()
        self.losses.append(sum(self._last.values()))
        if not math.isfinite(self.losses[-1]) or self._is_over(self.losses):
            step.trainer.max_updates = step.index + 1


class Again:
    """A batch that is served again and again, each time as a copy: a step may change it in place."""

    def __init__(self, batch: Any, times: int):
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[Any]:
        return (copy.deepcopy(self.batch) for _ in range(self.times))


@dataclass
class Trial:
    """What fits on one batch have in common."""

    plugins: Plugins
    settings: dict[str, Any]
    batch: Any
    more: tuple[Plugin, ...] = ()
    "Plugins that look on."

    def fit(
        self,
        task: TaskModule,
        updates: int,
        change: Variation | None = None,
        is_over: Callable[[list[float]], bool] = lambda losses: False,
    ) -> list[float]:
        """Train a task on the batch, and return the loss of each update."""
        change = change or Variation()
        size, batch = batch_size(self.batch), self.batch
        if change.samples is not None and size is not None:
            batch = with_rows_changed(batch, size, lambda x: x[: change.samples])
        return fit(task, Again(batch, updates), self.plugins, self.settings, updates, change, is_over, self.more)


def fit(
    task: TaskModule,
    batches: Any,
    plugins: Plugins,
    settings: dict[str, Any],
    updates: int,
    change: Variation | None = None,
    is_over: Callable[[list[float]], bool] = lambda losses: False,
    more: tuple[Plugin, ...] = (),
    seeded: bool = True,
) -> list[float]:
    """Train on these batches with the run's own stack, without its schedules, and return the loss of each update.

    `seeded`: every step draws the same random numbers.
    """
    keeper = KeepsLosses(change := change or Variation(), is_over, seeded)
    options = {**settings, "max_updates": updates, "max_epochs": None}
    trainer = Trainer(plugins=plugins if "recipe" not in settings else plugins or None, **options)
    for plugin in list(trainer.stack):
        edits = getattr(plugin, "forge_edit_grads", None) is not None
        if is_left_out(plugin, SCHEDULE) or (edits and not change.edits):
            trainer.stack.remove(plugin.name)
    for plugin in (*more, keeper):
        trainer.stack.add(plugin)
    with torch.enable_grad():
        trainer.fit(task, batches)
    return keeper.losses
