"""A GAN on the 8 × 8 digits: two optimizers that take turns on the same batch, and a metric of sample quality.

A generator's loss says little about its samples. So a validation compares as many generated digits as real ones, by the
Fréchet distance between the two sets: how far their means and covariances differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge.metrics import drawing

Batch = tuple[Tensor, Tensor]


class DigitsGAN(forge.TaskModule):
    """A generator and a critic, both perceptrons, with the non-saturating loss; an update trains each once."""

    def __init__(self, noise: int = 32, hidden: int = 256, lr: float = 5e-4):
        super().__init__()
        self.noise, self.lr = noise, lr
        self.generator = nn.Sequential(
            nn.Linear(noise, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, 64),
            nn.Sigmoid(),
            nn.Unflatten(1, (8, 8)),
        )
        self.critic = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, hidden),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(hidden, 1),
        )
        self.seen: list[Tensor] = []

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: Batch, name: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the loss of the named network; the other's parameters require no gradient meanwhile."""
        real, _ = batch
        fake = self(torch.randn(len(real), self.noise, device=real.device))
        if name == "generator":
            return F.softplus(-self.critic(fake)).mean()
        return (F.softplus(-self.critic(real)) + F.softplus(self.critic(fake))).mean()

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        real, _ = batch
        if not self.is_padding:  # a padding batch: another rank counts it
            self.seen.append(real)
        return {"believed_real": torch.sigmoid(self.critic(real)).mean()}

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        """Return the distance between real digits and as many generated from fixed noise, and a picture of some."""
        assert self.trainer is not None
        shares = self.trainer.env.gather([part.cpu() for part in self.seen])
        real = torch.cat([part for share in shares for part in share])
        self.seen = []
        same = torch.randn(max(len(real), 32), self.noise, generator=torch.Generator().manual_seed(1998))
        fake = self(same.to(next(self.parameters()).device)).cpu()
        return {"distance": frechet_distance(real, fake[: len(real)]), "digits": drawing.grid(fake[:32])}

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {
            "critic": torch.optim.Adam(self.critic.parameters(), lr=self.lr, betas=(0.5, 0.999)),
            "generator": torch.optim.Adam(self.generator.parameters(), lr=self.lr, betas=(0.5, 0.999)),
        }


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Return the distance of the Gaussians fitted to two sets: |μ₁ - μ₂|² + tr(C₁ + C₂ - 2 (C₁ C₂)^½), in pixels.

    FID computes it on the features of a large network; here the features are the 64 pixels.
    """
    first, second = first.flatten(1).double(), second.flatten(1).double()
    c1, c2 = torch.cov(first.T), torch.cov(second.T)
    values, vectors = torch.linalg.eigh(c1)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ c2 @ root).clamp(min=0).sqrt().sum()
    means = (first.mean(0) - second.mean(0)).square().sum()
    return float(means + c1.trace() + c2.trace() - 2 * mixed)
