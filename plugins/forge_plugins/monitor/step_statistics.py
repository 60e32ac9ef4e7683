"""Statistics of one optimizer's step: hooks before it, removal after it, and what it showed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import forge
from forge_plugins.monitor.activations import Activations
from forge_plugins.monitor.alarms import SETTLED, Judge
from forge_plugins.monitor.gradients import Parameters
from forge_plugins.monitor.modules import is_compiled
from forge_plugins.monitor.packing import read, stacked, unpacked


class StepStatistics:
    """Follows a train step. `options`: monitor's."""

    def __init__(self, step: forge.Step, options: Any, modules: Sequence[tuple[str, nn.Module]]):
        self._prefix = "monitor/" if step.name is None else f"monitor/{step.name}/"
        self._step, self._index = step, step.index
        self._activations = Activations(step, modules, options.histograms)
        self._parameters = Parameters(step, options.weights, options.histograms)
        self._inspected = False
        self._losses: list[Tensor] = []
        "The loss of each micro-batch, on the device."
        model, self._handle = step.trainer.model, None
        if not is_compiled(model):
            self._handle: RemovableHandle | None = model.register_forward_hook(self._see_loss)

    def _see_loss(self, module: nn.Module, inputs: Any, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else output
        if self._step.recording and isinstance(loss, Tensor) and loss.numel() == 1 and not torch.is_inference(loss):
            self._losses.append(loss.detach())

    def inspect(self) -> None:
        """Record final gradients and unmoved weights. A closure calls this several times; only the first counts."""
        if not self._inspected:
            self._inspected = True
            self._parameters.before_step()

    def close(self) -> None:
        """Remove the hooks."""
        self._activations.close()
        if self._handle is not None:
            self._handle.remove()

    def finish(self, step: forge.Step) -> None:
        """Record the weights after the optimizer step."""
        if self._inspected:
            self._parameters.after_step(step.updated)

    def read(self, judge: Judge) -> tuple[dict[str, Any], list[str]]:
        """Return metrics by name, and the texts of alarms. Reads the device once."""
        tensors, device = {**self._parameters.pack, **self._activations.pack}, self._step.trainer.env.device
        contents = read(tensors | ({"loss": stacked(self._losses, device)} if self._losses else {}), device)
        readings = self._parameters.read(contents)
        metrics: dict[str, Any] = {**readings.metrics(), **self._activations.read(contents)}
        metrics |= {name: unpacked(numbers) for name, numbers in contents.items() if name.startswith("histogram/")}
        loss = fmean(contents["loss"]) if "loss" in contents else None
        alarms = judge.say(readings, loss, self._prefix, settled=self._index >= SETTLED)
        return {self._prefix + name: value for name, value in metrics.items()}, alarms
