"""Tiny tasks, batches and fits, of which a test can run hundreds.

Everything is made from private seeds: the same call gives the same bits, and the global RNG is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.engine.trainer import FitResult, Trainer

FEATURES, CLASSES = 6, 3

Batch = tuple[Tensor, Tensor]


def tiny_batches(sizes: Sequence[int] = (8, 8, 8, 8, 5), seed: int = 0) -> list[Batch]:
    """Return batches of (inputs, labels) for the tiny tasks, one of each size; the last one is shorter."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, FEATURES, generator=generator), torch.randint(CLASSES, (n,), generator=generator))
        for n in sizes
    ]


class TinyTask(TaskModule):
    """A classifier whose parts reveal mistakes.

    Dropout reveals plugins that draw random numbers, batch normalisation those that run a forward or change a mode,
    momentum those that change the optimizer.
    """

    def __init__(self, seed: int = 0, dropout: float = 0.2, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.net = _seeded(
            seed,
            lambda: nn.Sequential(
                nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, CLASSES)
            ),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        labels = y.argmax(1) if y.is_floating_point() else y  # a plugin may mix labels into shares of classes
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == labels).float().mean()}

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class TinyGAN(TaskModule):
    """Two adversarial networks, each with its own optimizer, whose name `training_step` gets."""

    def __init__(self, seed: int = 0, lr: float = 0.05):
        super().__init__()
        self.lr = lr
        self.generator = _seeded(seed, lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, FEATURES)))
        self.discriminator = _seeded(
            seed + 1, lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.discriminator(x)

    def training_step(self, batch: Batch, name: str) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        real = batch[0]
        fake = self.generator(torch.randn(len(real), 4, device=real.device))
        if name == "generator":
            return {"loss": _binary_loss(self.discriminator(fake), 1.0)}
        loss = _binary_loss(self.discriminator(real), 1.0) + _binary_loss(self.discriminator(fake.detach()), 0.0)
        return {"loss": loss / 2}

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": _binary_loss(self(batch[0]), 1.0)}

    def configure_optimizers(self) -> Any:
        return {
            "generator": torch.optim.Adam(self.generator.parameters(), lr=self.lr),
            "discriminator": torch.optim.SGD(self.discriminator.parameters(), lr=self.lr),
        }


def fit_tiny(
    plugins: Iterable[Plugin | type[Plugin] | str] = (),
    *,
    task: TaskModule | None = None,
    train: Any = None,
    val: Any = None,
    **trainer_options: Any,
) -> tuple[TaskModule, FitResult]:
    """Fit a TinyTask on tiny batches with exactly these plugins; return the trained task and the result.

    The defaults are two epochs with seed 0 on the CPU, without a run folder; the Trainer's options change them:
    `fit_tiny([MyPlugin()], task=TinyGAN(), max_epochs=5, run_dir=folder)`.
    """
    trained: TaskModule = task or TinyTask()
    options: dict[str, Any] = {"seed": 0, "run_dir": False, "device": "cpu", "log_every": 2, **trainer_options}
    if "max_updates" not in options:
        options.setdefault("max_epochs", 2)
    trainer = Trainer(plugins=list(plugins), **options)
    train = tiny_batches() if train is None else train
    return trained, trainer.fit(trained, train, tiny_batches(seed=1) if val is None else val)


def _seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Call `make` with the RNG at `seed`, and restore the RNG."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _binary_loss(scores: Tensor, answer: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, answer))
