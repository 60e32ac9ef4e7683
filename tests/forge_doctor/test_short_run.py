"""Findings of the short run and of learning: each with its bug, and with a healthy neighbour."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.config.build import make_plugins
from forge_doctor.experiments import motion
from tests.support.patients import Healthy, found, splits
from tests.support.profiles import some


def names(task: forge.TaskModule, data: Any = None, **options: Any) -> set[str]:
    train, val = data or splits()
    return {finding.name for finding in forge.doctor(task, train, val, **options).findings}


class Leaps(Healthy):
    rate = 1e4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Walks(Leaps):
    rate = 0.1


@pytest.mark.slow
def test_losses_that_leave_all_bounds() -> None:
    assert "diverges" in names(Leaps())
    assert names(Walks()) == set()


@pytest.mark.slow
def test_a_clip_that_decides_every_update() -> None:
    assert "clips_always" in names(Healthy(), plugins=make_plugins({"clip": {"max_norm": 1e-5}}))
    assert names(Healthy(), plugins=make_plugins({"clip": {"max_norm": 1.0}})) == set()


@pytest.mark.parametrize("limits", some([{"max_norm": 1e6}, {"max_norm": None, "max_value": 1e6}]))
def test_a_clip_that_never_acts(limits: dict[str, Any]) -> None:
    assert names(Healthy(), plugins=make_plugins({"clip": limits})) == {"clips_never"}


@pytest.mark.slow
@pytest.mark.parametrize("limits", some([{"max_norm": 20.0}, {"max_norm": 1e6, "max_value": 0.1}]))
def test_a_clip_that_waits_for_a_spike_is_left_alone(limits: dict[str, Any]) -> None:
    assert names(Healthy(), plugins=make_plugins({"clip": limits})) == set()


class Counts(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any) -> Any:
        self.seen += 1
        return super().training_step(batch) * (1 + 1 / self.seen)


class CountsForItself(Counts):
    """Its step says the same with the first value."""

    def training_step(self, batch: Any) -> Any:
        self.seen += 1
        return Healthy.training_step(self, batch)


class CountsInABuffer(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any) -> Any:
        self.seen += 1
        return super().training_step(batch)


@pytest.mark.slow
def test_state_that_no_checkpoint_has() -> None:
    assert "state_not_saved" in names(Counts())
    assert "state_not_saved" not in names(CountsInABuffer())
    assert "state_not_saved" not in names(CountsForItself())


class Deep(Healthy):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8) for _ in range(12)]
        for layer in layers:
            nn.init.orthogonal_(layer.weight, self.gain)
        self.net = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())), nn.Linear(8, 4))


class Amplified(Deep):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8) for _ in range(12)]
        for layer in layers:
            nn.init.orthogonal_(layer.weight, 6.0)
        self.net = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())), nn.Linear(8, 4))


def test_gradients_that_explode() -> None:
    assert "exploding_gradient" in found(Amplified(), motion.gradients)
    assert found(Deep(), motion.gradients) == {}
