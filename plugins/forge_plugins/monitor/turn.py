"""Statistics of one optimizer's turn: hooks before it, removal after it, numbers in flight."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Protocol

from torch import Tensor, nn

import forge
from forge_plugins.monitor.activations import Activations
from forge_plugins.monitor.alarms import SETTLED, Judge
from forge_plugins.monitor.gradients import Parameters
from forge_plugins.monitor.histograms import unpacked
from forge_plugins.monitor.loss import Losses
from forge_plugins.monitor.parcel import Contents, stacked


class StatisticsOptions(Protocol):
    """The options of monitor that select statistics."""

    gradients: bool
    weights: bool
    activations: bool


class TurnStatistics:
    """Follows a train step. `count`: compute statistics; `draw`: make histograms."""

    def __init__(
        self,
        step: forge.Step,
        options: StatisticsOptions,
        modules: Sequence[tuple[str, nn.Module]],
        count: bool,
        draw: bool,
    ):
        self._prefix = "monitor/" if step.name is None else f"monitor/{step.name}/"
        self._index, self._samples, self._device = step.index, step.samples, step.trainer.env.device
        self._activations = Activations(step, modules if options.activations else (), count, draw)
        self._parameters = Parameters(step, options.gradients, options.weights, count, draw)
        self._losses = Losses(step)
        self._inspected = False

    def inspect(self) -> None:
        """Record final gradients and unmoved weights. A closure calls this several times; only the first counts."""
        if not self._inspected:
            self._inspected = True
            self._parameters.before_step()

    def close(self) -> None:
        """Remove the hooks."""
        self._activations.close()
        self._losses.close()

    def finish(self, step: forge.Step) -> None:
        """Record the weights after the optimizer step."""
        if self._inspected:
            self._parameters.after_step(step.updated)

    def pack(self) -> dict[str, Tensor]:
        """Return the tensors to read."""
        found = {**self._parameters.pack, **self._activations.pack()}
        return found | ({"loss": stacked(self._losses.seen, self._device)} if self._losses.seen else {})

    def read(self, contents: Contents, judge: Judge) -> tuple[dict[str, Any], list[str]]:
        """Return metrics by name, and the texts of alarms."""
        readings, activations = self._parameters.read(contents), self._activations.read(contents)
        metrics: dict[str, Any] = dict(readings.metrics())
        for name, seen in activations.items():
            metrics |= {f"activation/{name}/{what}": value for what, value in seen.metrics().items()}
        for name, numbers in contents.items():
            if name.startswith("histogram/"):
                metrics[name] = unpacked(numbers)
        loss = fmean(contents["loss"]) if "loss" in contents else None
        alarms: list[str] = []
        if self._index < SETTLED:
            judge.meet(readings, self._prefix)
        else:
            alarms = judge.say(readings, activations, self._samples, loss, self._prefix)
        return {self._prefix + name: value for name, value in metrics.items()}, alarms
