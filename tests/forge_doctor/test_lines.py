"""Lines of a step that compute nothing: their result is one value, or what they were given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_doctor.experiments import lines
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
