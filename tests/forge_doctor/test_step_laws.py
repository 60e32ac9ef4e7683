"""What a step must hold: lines that compute, fair draws, a queue that advances, views that differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge
from forge_doctor.experiments import lines, stages, values
from tests.support.patients import Healthy, found


class Hidden(Healthy):
    """Has a line for each of the cases."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self(x)
        nearest = (torch.cdist(scores, scores) * (y[:, None] != y)).amin(1)
        return {"loss": F.cross_entropy(scores, y) + nearest.mean()}


class Unmasked(Healthy):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": F.cross_entropy(self(x.masked_fill(x > 1e6, 0.0)), y)}


class OnePlace(Healthy):
    """Attends over one place: the weights are 1, whatever the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": F.cross_entropy(self(x * self.score(x).softmax(1)), y)}


class Gated(Healthy):
    """Begins with a branch that adds nothing, and learns to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        if not torch.isfinite(x).all():
            return None
        scores = self(x + self.gate * torch.tanh(x))
        return {"loss": F.cross_entropy(scores, y), "accuracy": (scores.argmax(1) == y).float().mean()}


def said(task: Healthy) -> dict[str, str]:
    return {name: finding.message for name, finding in found(task, lines.results).items()}


def test_a_smallest_distance_that_is_always_zero() -> None:
    assert "amin gives 0" in said(Hidden())["line_is_constant"]


def test_weights_over_one_place() -> None:
    assert "softmax gives 1" in said(OnePlace())["line_is_constant"]


def test_a_mask_that_masks_nothing() -> None:
    assert "masked_fill returns what it was given" in said(Unmasked())["line_does_nothing"]


def test_a_branch_that_begins_at_zero_and_a_guard_are_no_findings() -> None:
    assert said(Gated()) == {} == said(Healthy())


def test_a_line_that_gives_every_sample_the_same() -> None:
    class Averaged(Healthy):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.ones(len(x), len(x)) @ x)

    assert "every sample of a batch the same" in said(Averaged())["line_is_constant"]


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
