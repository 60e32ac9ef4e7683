"""Regression: a noisy surface of waves, targets in their own units, and metrics over the whole validation set.

A network learns best from targets of mean 0 and variance 1. So the task normalises targets for its loss, and predicts
in their original units. RMSE and R² are not means over batches: they are computed once, from all predictions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge.data import Splits, TensorLoader

Batch = tuple[Tensor, Tensor]


class Regression(forge.TaskModule):
    """A perceptron that predicts one number; `mean` and `std` are those of the training targets."""

    def __init__(self, inputs: int = 2, hidden: int = 64, mean: float = 0.0, std: float = 1.0, lr: float = 1e-2):
        super().__init__()
        self.mean, self.std, self.lr = mean, std, lr
        self.net = nn.Sequential(
            nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 1)
        )
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, points: Tensor) -> Tensor:
        """Return predictions in the targets' units."""
        return self.mean + self.std * self.net(points).squeeze(1)

    def training_step(self, batch: Batch) -> Tensor:
        points, targets = batch
        return F.mse_loss((self(points) - self.mean) / self.std, (targets - self.mean) / self.std)

    def validation_step(self, batch: Batch) -> Tensor:
        if not self.is_padding:  # a padding batch: another rank counts it
            self.seen.append((self(batch[0]), batch[1]))
        return self.training_step(batch)

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        """Return the metrics of the whole set, and a picture of predictions against truths."""
        assert self.trainer is not None
        shares = self.trainer.env.gather([(guess.cpu(), truth.cpu()) for guess, truth in self.seen])
        self.seen = []
        guesses = torch.cat([guess for share in shares for guess, _ in share])
        truths = torch.cat([truth for share in shares for _, truth in share])
        return {**figures(guesses, truths), "fit": scatter(guesses, truths)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def figures(guesses: Tensor, truths: Tensor) -> dict[str, float]:
    """Return mean absolute error, root of the mean squared error, and the explained share of the variance."""
    error, truths = (guesses - truths).double(), truths.double()
    unexplained, total = error.square().sum(), (truths - truths.mean()).square().sum()
    return {
        "mae": float(error.abs().mean()),
        "rmse": float(error.square().mean().sqrt()),
        "r2": float(1 - unexplained / total),
    }


def scatter(guesses: Tensor, truths: Tensor, bins: int = 96) -> forge.Image:
    """Return a histogram of predictions (upwards) by truth (to the right); correct ones lie on the diagonal."""
    low, high = float(truths.min()), float(truths.max())
    both = torch.stack([guesses.clamp(low, high), truths], 1).double()
    counts = torch.histogramdd(both, bins=[bins, bins], range=[low, high, low, high]).hist
    return forge.Image((counts / counts.max().clamp(min=1)).sqrt().flip(0).float(), "predicted against true")


def waves(samples: int = 4000, noise: float = 2.0, batch_size: int = 64) -> Splits:
    """Generate points of a plane and the height of a wavy surface, around 100, with noise of this standard deviation.

    They are the same in every run. No model can have an RMSE below `noise` on the validation set.
    """
    make = torch.Generator().manual_seed(1998)
    points = 2 * torch.rand(samples, 2, generator=make) - 1
    x, y = points.unbind(1)
    heights = 100 + 20 * torch.sin(4 * x) * torch.cos(3 * y) + 10 * x * y
    heights += noise * torch.randn(samples, generator=make)
    cut = samples * 4 // 5
    return Splits(
        train=TensorLoader(points[:cut], heights[:cut], batch_size=batch_size, shuffle=True),
        val=TensorLoader(points[cut:], heights[cut:], batch_size=256),
    )
