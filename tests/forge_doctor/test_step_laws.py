"""What a step must hold: fair draws, a queue that advances, views that differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge
from forge_doctor.experiments import stages, values
from tests.support.patients import Healthy, found


class Thinned(Healthy):
    """Drops features and does not scale up what is left."""

    kept = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.drop = Drop(self.kept)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


class Drop(nn.Module):
    def __init__(self, share: float):
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.4) / self.share if self.training else x


class Scaled(Thinned):
    kept = 0.6


def test_what_is_random_gives_on_average_what_it_gives_in_evaluation() -> None:
    assert "0.60 times" in found(Thinned(), stages.on_average)["modes_differ"].message
    assert found(Scaled(), stages.on_average) == {}


class Queued(Healthy):
    """Keeps the last scores, in a queue whose place advances or not."""

    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(64, 8))
        self.place = 0

    def training_step(self, batch: Any) -> Any:
        rows = torch.arange(self.place, self.place + 4) % 64
        self.queue[rows] = batch[0][:4].detach()
        self.place += self.step
        return super().training_step(batch)


class Advancing(Queued):
    step = 4


def test_a_queue_whose_place_does_not_advance() -> None:
    train = [(torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(8)]
    report = forge.doctor(Queued(), train, budget=0)
    assert "4 of the 64 rows of queue" in next(f.message for f in report.findings if f.name == "same_rows_written")
    assert not [f for f in forge.doctor(Advancing(), train, budget=0).findings if f.name == "same_rows_written"]


def test_two_views_that_are_one() -> None:
    x, y = torch.randn(32, 8), torch.randint(3, (32,))
    train = DataLoader(TensorDataset(x, x.clone(), y), batch_size=16)
    assert "batch[0] and batch[1]" in found(Views(), values.equal, data=(train, train))["equal_tensors"].message


class Views(Healthy):
    def training_step(self, batch: Any) -> Any:
        return {"loss": F.cross_entropy(self(batch[0]) + self(batch[1]), batch[2])}

    validation_step = training_step
