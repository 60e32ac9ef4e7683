"""Directions of metrics, and weights of batches in their means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

from forge_doctor.probes import measures
from tests.support.patients import Healthy, found


class Plateau(Healthy):
    monitor = "val/loss"

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return optimizer, ReduceLROnPlateau(optimizer, mode=self.mode), self.monitor


class ByAccuracy(Plateau):
    monitor = "val/accuracy"


def test_a_plateau_of_the_wrong_direction() -> None:
    assert "wrong_mode" in found(Plateau("max"), measures.modes)
    assert "wrong_mode" in found(ByAccuracy("min"), measures.modes)
    assert found(Plateau("min"), measures.modes) == found(ByAccuracy("max"), measures.modes) == {}


@pytest.mark.parametrize(("mode", "wrong"), [("max", 1), ("min", 0), (None, 0)])
def test_a_plugin_of_the_wrong_direction(mode: Any, wrong: int) -> None:
    best = {"monitor": "val/loss", "mode": mode}
    plugin = SimpleNamespace(name="checkpoint", config={"best": best, "keep": 2})
    patient: Any = SimpleNamespace(plugins=[plugin], trainer=SimpleNamespace(optimizers=SimpleNamespace(entries={})))
    assert [finding.where for finding in measures.modes(patient)] == ["checkpoint.best"] * wrong


class Tagger(Healthy):
    """Tags of tokens; some words are harder than others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(20, 4))

    def training_step(self, batch: Any) -> Any:
        ids, tags = batch
        return {"loss": F.cross_entropy(self(ids).movedim(2, 1), tags)}

    validation_step = training_step


class Counted(Tagger):
    def num_items(self, batch: Any) -> Tensor:
        return (batch[1] >= 0).sum()


def sentences(lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Batches of eight sentences, each with one length and half of it."""
    batches = []
    generator = torch.Generator().manual_seed(0)
    for number, length in enumerate(lengths):
        ids = torch.randint(4 * number, 4 * number + 4, (8, length), generator=generator)
        tags = torch.randint(4, (8, length), generator=generator)
        tags[:4, length // 2 :] = -100
        batches.append((ids, tags))
    return batches


def test_batches_of_many_and_of_few_tokens() -> None:
    uneven = sentences([4, 8, 40, 40])
    assert found(Tagger(), measures.weights, data=(uneven, uneven))["metric_by_batch"].level == "warning"
    assert found(Counted(), measures.weights, data=(uneven, uneven)) == {}
    even = sentences([16, 18, 20, 22])
    assert found(Tagger(), measures.weights, data=(even, even)) == {}
