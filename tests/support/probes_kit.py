"""What the tests of probes share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.patients import Healthy, numbers


def task_with(loss: Any, outputs: int = 4) -> Healthy:
    task = Healthy()
    task.loss = loss  # pyright: ignore[reportAttributeAccessIssue]
    task.net[2] = nn.Linear(16, outputs)
    task.check_first_batch = False  # pyright: ignore[reportAttributeAccessIssue]
    return task


class OverTheBatch(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - x.mean(0)) / (x.std(0) + 1e-5))


class PlaceInTheBatch(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + torch.arange(len(x))[:, None])


DEPENDENT: list[Any] = [(task, {"batch_dependence"}) for task in (OverTheBatch, PlaceInTheBatch)]


def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    other, labels = numbers(40, seed=9)
    return torch.cat([x[:8], other]), torch.cat([y[:8], labels])
