"""What the tests of averaged weights share: plain loops that average, and tasks that show what was evaluated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import forge
from forge.testing import TinyTask, tiny_batches
from tests.support import reference


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def ema_of(model: nn.Module, decay: float = 0.9) -> AveragedModel:
    """torch's moving average of a model."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))


def mean_of(model: nn.Module) -> AveragedModel:
    """torch's mean, as it computes it on CUDA: on the CPU its default rounds otherwise in the last bit."""
    return AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())


def train(model: nn.Module, after: Callable[[int], Any], epochs: int = 2, window: int = 1) -> None:
    """A plain loop that calls `after` with the number of each update."""
    calls = _EachStep(after)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference.train(model, loss_of, optimizer, tiny_batches(), epochs, window=window, schedule=calls, seed=0)


class _EachStep:
    """Stands where a hand-written loop has its schedule."""

    def __init__(self, after: Callable[[int], Any]):
        self.after, self.update = after, 0

    def step(self) -> None:
        self.update += 1
        self.after(self.update)


def by_hand(
    average_of: Callable[[nn.Module], AveragedModel],
    taken: Callable[[int], bool] = lambda update: True,
    task: nn.Module | None = None,
    epochs: int = 2,
    window: int = 1,
) -> AveragedModel:
    """A plain loop that takes the weights into torch's average after the updates that `taken` says."""
    model = task or TinyTask()
    average = average_of(model)
    train(model, lambda update: average.update_parameters(model) if taken(update) else None, epochs, window)
    return average


def applied(plugin: Any, task: nn.Module) -> nn.Module:
    """A copy of the task with the average in it."""
    task = copy.deepcopy(task)
    plugin.apply_to(task)
    return task


def parameters(task: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in task.named_parameters()}


def skipping(*updates: int) -> forge.Plugin:
    @forge.on("inspect_grads", mutates=True)
    def skip(step: forge.Step) -> None:
        if step.index in updates:
            step.skip_update("as told")

    return skip


class Watched(TinyTask):
    """Remembers what each validation used, and where it lay."""

    def __init__(self, seed: int = 0, dropout: float = 0.2, lr: float = 0.1):
        super().__init__(seed, dropout, lr)
        self.seen: list[dict[str, Tensor]] = []
        self.places: list[list[int]] = []

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        self.seen.append({name: tensor.clone() for name, tensor in self.state_dict().items()})
        self.places.append([p.data_ptr() for p in self.parameters()])
        return {}
