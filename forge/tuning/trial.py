"""TuningTrial: a few real updates on a fresh task, for a measurement; nothing is written."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge.config import Recipe
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.engine.trainer import FitResult, Plugins, Trainer
from forge.optim.optimizers import Optimizers
from forge.snapshot.left_out import SCHEDULE, is_left_out


class TuningTrial(Plugin):
    """The measuring plugin of a trial; it removes the task's own schedules."""

    @hookimpl(wrapper=True)
    def forge_build_optimizers(self) -> Generator[None, Optimizers, Optimizers]:
        built = yield
        remove_schedules(built)
        return built

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        remove_schedules(trainer.optimizers)  # a plugin may have added one


def remove_schedules(optimizers: Optimizers) -> None:
    """Remove all schedules, and restore the rates that the optimizers were made with."""
    for entry in optimizers.entries.values():
        entry.schedules.clear()
        for group in entry.optimizer.param_groups:
            if "initial_lr" in group:  # a schedule has changed it already
                set_rate(group, float(group["initial_lr"]))
    optimizers.has_schedules = False


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a parameter group's learning rate, which may be a tensor that a compiled or captured step reads."""
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def run_trial(
    trial: TuningTrial,
    make_task: Callable[[], TaskModule],
    make_train: Callable[[], Any],
    *,
    updates: int,
    recipe: str | Path | Recipe | None = None,
    plugins: Plugins = (),
    without: Collection[str] = (),
    **options: Any,
) -> FitResult:
    """Train a fresh task for some updates, with the stack less the plugins that observe, save or intervene.

    `without`: what other plugins provide that are left out too.
    """
    settings = {"max_epochs": None, "validate_every": None, "resume": None, "run_dir": False, **options}
    trainer = Trainer(recipe=recipe, plugins=plugins, max_updates=updates, **settings)
    for plugin in [plugin for plugin in trainer.stack if is_left_out(plugin, SCHEDULE, *without)]:
        trainer.stack.remove(plugin.name)
    trainer.stack.add(trial)
    with quiet():
        return trainer.fit(make_task(), make_train())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs of forge and torch, and UserWarnings: a run of this length says nothing to the user."""
    loggers = [logging.getLogger(name) for name in ("forge", "torch.utils.cpp_extension", "torch._inductor")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
