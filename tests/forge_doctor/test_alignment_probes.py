"""A loss whose minimum is not at the target, and metrics that a perfect prediction does not bring to 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_doctor.experiments import reachable
from tests.support.patients import Healthy, found, loader


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """A finding depends on the first weights; how often one is missed is measured by benchmarks.doctor."""
    torch.manual_seed(1)


class Numbers(Healthy):
    """One or more numbers for each sample; subclasses say how the loss is made."""

    outputs = 1

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, self.outputs))

    def forward(self, x: Tensor) -> Any:
        return self.net(x).squeeze(-1)

    def loss(self, scores: Any, y: Tensor) -> Tensor:
        return F.mse_loss(scores, y)

    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self(x)
        return {"loss": self.loss(scores, y), **self.metrics(scores, y)}

    def metrics(self, scores: Any, y: Tensor) -> dict[str, Tensor]:
        return {}


def data(make: Any, count: int = 64) -> Any:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))
    y = make(x)
    return loader(x, y), loader(x.flip(0), y.flip(0), shuffle=False)


def vectors() -> Any:
    return data(lambda x: x[:, :3].contiguous())


# -- the loss ---------------------------------------------------------------------------------------------------------


class Apart(Numbers):
    outputs = 3

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cosine_similarity(scores, y, dim=1).mean()


class Together(Apart):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return 1 - super().loss(scores, y)


@pytest.mark.parametrize(
    ("task", "given"),
    [(Healthy, None), (Together, vectors)],
    ids=lambda x: x.__name__ if x else "",
)
def test_a_loss_that_leads_to_its_target(task: type[Healthy], given: Any) -> None:
    assert found(task(), reachable.metrics, data=given() if given else None) == {}


# -- metrics ----------------------------------------------------------------------------------------------------------


class FixedSize(Healthy):
    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        return {"accuracy": (self(x).argmax(1) == y).sum() / 5}


class InPerCent(Healthy):
    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        return {"accuracy": 100 * (self(x).argmax(1) == y).float().mean()}


def test_a_metric_that_right_answers_do_not_bring_to_one() -> None:
    assert "metric_wrong" in found(FixedSize(), reachable.metrics)
    assert found(InPerCent(), reachable.metrics) == {}


# -- spreads, quantiles and penalties ---------------------------------------------------------------------------------
