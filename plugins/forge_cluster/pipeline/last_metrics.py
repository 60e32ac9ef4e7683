"""The metrics of the last stage, on all ranks of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import forge
from forge.errors import TaskError
from forge.util.patterns import MANY, listed
from forge_cluster.pipeline.staging import MetricName, StagedEnv, with_metrics


class LastMetrics:
    """Sends the metrics of a window in one message, and reads nothing from the device."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []
        "Those of each part of the micro-batch, on the rank of the last stage."
        self._means: list[list[Any]] = []
        "Those of each micro-batch of the window, there."
        self._names: list[str] | None = None
        self._objects: dict[str, MetricName] = {}
        "The numbers and the torchmetrics objects of a step, known to all ranks from the first one on."
        self._sent: tuple[Any, Tensor] | None = None
        "A message on its way."

    def record(self, env: StagedEnv, step: forge.Step, weights: list[Any]) -> None:
        """Take the means of a micro-batch; after the last one, send them all."""
        if step.micro == 0:
            self._means = []
        means: dict[str, Any] = {}
        if env.pipe_rank == env.last:
            own = self.parts[: len(weights)]
            self._objects = {k: v for k, v in own[0].items() if isinstance(v, MetricName)}
            numbers = [k for k in own[0] if k not in self._objects]
            means = {k: sum(map(_weighed, weights, [each[k] for each in own])) for k in numbers}
            self._means.append(list(means.values()))
        if self._names is None:
            self._names, self._objects = env.from_last((list(means), self._objects))
        names = self._names or []
        if env.pipe_rank == env.last and list(means) != names:
            raise TaskError(
                f"pipeline: training_step returned {listed(names, MANY)} first, and now {listed(list(means), MANY)}. "
                "Return the same metrics in every step."
            )
        if not step.is_last_micro or not step.recording:
            return
        values = torch.zeros(len(step.window), len(names), dtype=torch.float64, device=env.device)
        for row, found in zip(values, self._means, strict=False):
            for place, value in enumerate(found):
                row[place] = value
        self._sent = dist.broadcast(values, group=env.pipe_group, group_src=env.last, async_op=True), values

    def arrive(self, step: forge.Step) -> None:
        """Wait for what was sent, which travelled while gradients did, and hand it to the run."""
        if self._sent is not None:
            (work, values), self._sent = self._sent, None
            work.wait()
            for row, items in zip(values, step.items, strict=True):
                found = dict(zip(self._names or (), row.unbind(), strict=True))
                found |= with_metrics(self._objects, step.trainer.task)
                step.trainer.means.add_all(step.prefix, found, items)


def _weighed(weight: Any, value: Any) -> Any:
    """Return a part's share of a metric; a mean over no items is NaN, and does not count."""
    return torch.where(torch.as_tensor(weight == 0), 0.0, torch.as_tensor(weight * value))
