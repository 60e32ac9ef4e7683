"""Findings of the short run and of learning: each with its bug, and with a healthy neighbour."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import forge
from forge.config.build import make_plugins
from forge.diagnose.doctor_probes import motion
from tests.support.patients import Healthy, found, loader, numbers, splits


def names(task: forge.TaskModule, budget: int = 0, data: Any = None, **options: Any) -> set[str]:
    train, val = data or splits()
    return {finding.name for finding in forge.doctor(task, train, val, budget=budget, **options).findings}


class Leaps(Healthy):
    rate = 1e4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Walks(Leaps):
    rate = 0.1


class Stands(Leaps):
    rate = 1e-12


def test_losses_that_leave_all_bounds() -> None:
    assert "diverges" in names(Leaps())
    assert names(Walks()) == set()


def test_a_batch_that_is_not_learnt() -> None:
    assert "cannot_learn_a_batch" in names(Stands(), budget=60)
    assert names(Walks(), budget=60) == set()


def test_a_clip_that_decides_every_update() -> None:
    assert "clips_always" in names(Healthy(), plugins=make_plugins({"clip": {"max_norm": 1e-5}}))
    assert names(Healthy(), plugins=make_plugins({"clip": {"max_norm": 1.0}})) == set()


class Counts(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any) -> Any:
        self.seen += 1
        return super().training_step(batch) * (1 + 1 / self.seen)


class CountsInABuffer(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any) -> Any:
        self.seen += 1
        return super().training_step(batch)


def test_state_that_no_checkpoint_has() -> None:
    assert "state_not_saved" in names(Counts())
    assert "state_not_saved" not in names(CountsInABuffer())


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


def test_labels_that_nothing_tells() -> None:
    x, _ = numbers(320)
    y = torch.randint(0, 4, (320,), generator=torch.Generator().manual_seed(9))
    random = loader(x[:256], y[:256], batch=32), loader(x[256:], y[256:], batch=32, shuffle=False)
    assert "labels_no_easier" in names(Walks(), budget=60, data=random)
