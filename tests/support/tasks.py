"""Small tasks and data that several tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.env import Env
from forge.testing import TinyGAN


class PlainGAN(TinyGAN):
    """Noise that is a function of the batch, so that it does not depend on the rank."""

    def training_step(self, batch: Any, name: str) -> dict[str, torch.Tensor]:
        real = batch[0]
        fake = self.generator(real[:, :4].contiguous())
        if name == "generator":
            return {"loss": F.softplus(-self.discriminator(fake)).mean()}
        right = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake.detach())).mean()
        return {"loss": right / 2}


class Classifier(forge.TaskModule):
    """Eight features, three classes."""

    def __init__(self, hidden: int = 8, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def make_batches(count: int = 4, size: int = 4, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def fit(task: forge.TaskModule | None = None, train: Any = None, val: Any = None, **options: Any) -> forge.FitResult:
    """Fit with nothing but what is asked for, writing nothing."""
    settings = {"max_epochs": 1, "plugins": [], "run_dir": False, **options}
    return forge.Trainer(**settings).fit(task or Classifier(), make_batches() if train is None else train, val)


def second_rank() -> Env:
    """The place of the second of two processes, without the first: for what only the first may write."""
    env = Env("cpu")
    env.rank, env.world = 1, 2
    return env


class SecondRank(forge.Plugin):
    """Plays the second of two processes."""

    @forge.hookimpl
    def forge_setup_env(self) -> Env:
        return second_rank()


def noting(event: str, value: Callable[..., Any], every: str | None = None) -> tuple[forge.Plugin, list[Any]]:
    """A callback of an event, and what `value` makes of the event's arguments each time that it is called."""
    noted: list[Any] = []

    @functools.wraps(value)
    def note(*given: Any) -> None:
        noted.append(value(*given))

    note.__name__ = f"note_{event}"
    return forge.on(event, every=every)(note), noted
