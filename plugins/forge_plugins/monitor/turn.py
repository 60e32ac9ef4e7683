"""One look at the turn of one optimizer: hooks on before it, off after it, numbers on their way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

import forge
from forge_plugins.monitor.activations import Activations
from forge_plugins.monitor.alarms import SETTLED, Judge
from forge_plugins.monitor.gradients import Parameters
from forge_plugins.monitor.histograms import unpacked
from forge_plugins.monitor.parcel import Contents


class StatisticsOptions(Protocol):
    """What to look at, among monitor's options."""

    gradients: bool
    weights: bool
    activations: bool


class TurnStatistics:
    """Follows a train step. `count`: take statistics; `draw`: make histograms."""

    def __init__(
        self,
        step: forge.Step,
        options: StatisticsOptions,
        modules: Sequence[tuple[str, nn.Module]],
        count: bool,
        draw: bool,
    ):
        self._prefix = "monitor/" if step.name is None else f"monitor/{step.name}/"
        self._index, self._samples = step.index, step.samples
        self._activations = Activations(step, modules if options.activations else (), count, draw)
        self._parameters = Parameters(step, options.gradients, options.weights, count, draw)
        self._inspected = False

    def inspect(self) -> None:
        """Gradients are true now, and the weights have not moved. A closure comes by here several times."""
        if not self._inspected:
            self._inspected = True
            self._parameters.before_step()

    def close(self) -> None:
        """Take the hooks off, whatever happened."""
        self._activations.close()

    def finish(self, step: forge.Step) -> None:
        """The optimizer has stepped, or not."""
        if self._inspected:
            self._parameters.after_step(step.updated)

    def pack(self) -> dict[str, Tensor]:
        """What is to be read."""
        return {**self._parameters.pack, **self._activations.pack()}

    def read(self, contents: Contents, judge: Judge) -> tuple[dict[str, Any], list[str]]:
        """Metrics by name, and alarms in words."""
        readings, activations = self._parameters.read(contents), self._activations.read(contents)
        metrics: dict[str, Any] = dict(readings.metrics())
        for name, seen in activations.items():
            metrics |= {f"activation/{name}/{what}": value for what, value in seen.metrics().items()}
        for name, numbers in contents.items():
            if name.startswith("histogram/"):
                metrics[name] = unpacked(numbers)
        alarms = judge.say(readings, activations, self._samples) if self._index >= SETTLED else []
        return {self._prefix + name: value for name, value in metrics.items()}, alarms
