"""Calibration: time a few updates of the task on this machine, so that predictions start from a measured step."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from forge.config import Recipe
from forge.config.build import make_plugins
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.step import Step
from forge.data.accumulation_windows import batch_size
from forge.engine.trainer import Trainer
from forge.planning.plan import first_batch
from forge_cluster.planning.hardware import Cluster, MeasuredStep
from forge_cluster.planning.workload import AMP, APART, REMAT, _part

UPDATES, WARM_UP = 12, 4


class UpdateClock(Plugin):
    """Times updates, from the end of one to the end of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    @hookimpl
    def forge_step_end(self, step: Step) -> None:
        if step.trainer.env.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Return the median time of an update after the warm-up."""
        pairs = zip(self.ends[WARM_UP:], self.ends[WARM_UP + 1 :], strict=False)
        return statistics.median(b - a for a, b in pairs)


def measured_step(recipe: Recipe, samples: int | None = None, updates: int = UPDATES) -> MeasuredStep:
    """Train a few updates of the recipe on this machine, without strategies and files, and return the median's time."""
    batch = first_batch(recipe)
    size = batch_size(batch) or 1
    if samples is not None and samples < size:
        batch, size = _part(batch, size, samples), samples
    stack: dict[str, Mapping[str, Any]] = {
        n: o for n, o in recipe.plugins.items() if n in (AMP, REMAT) or n not in APART
    }
    watch = UpdateClock()
    plugins = [plugin for plugin in make_plugins(stack) if not plugin.observer]
    options: dict[str, Any] = {"run_dir": False, "validate_every": None, "max_updates": updates}
    with contextlib.redirect_stderr(io.StringIO()):
        Trainer(plugins=[*plugins, watch], **options).fit(recipe.make_task(), [batch] * (updates + 1))
    return MeasuredStep(watch.seconds, size, "bf16" if AMP in stack else "fp32", REMAT in stack)


def calibrated_cluster(cluster: Cluster, recipe: Recipe) -> Cluster:
    """Return the cluster with a step of the recipe that was measured here: this machine should have such a GPU."""
    return replace(cluster, measured=measured_step(recipe))
