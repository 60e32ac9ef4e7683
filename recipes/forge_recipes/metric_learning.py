"""Metric learning: pictures of one class come close to each other, those of other classes stay away.

The NT-Xent loss with labels (P. Khosla et al., Supervised Contrastive Learning, 2020, https://arxiv.org/abs/2004.11362)
trains on FashionMNIST. Validation asks for recall@1 on pictures that training does
not show: for how many of them the nearest other one is of the same class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge.data import Splits, TensorLoader
from forge_recipes.fashion_mnist import find_files, read_part

Batch = tuple[Tensor, Tensor]

ROWS = 512
"""Pictures whose distances to all others are computed at once."""


class Embedder(forge.TaskModule):
    """A small convolutional network that maps a picture to a point on a sphere."""

    def __init__(self, width: int = 32, points: int = 64, temperature: float = 0.1, lr: float = 2e-3):
        super().__init__()
        self.temperature, self.lr = temperature, lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 7 * 7, points),
        )
        self._seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.net(images), dim=1)

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        return {"loss": nt_xent(self(images), labels, self.temperature)}

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        points = self(images)
        if not self.is_padding:
            self._seen.append((points, labels))
        return {"loss": nt_xent(points, labels, self.temperature)}

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        """Return recall@1 over all pictures of the evaluation, those of all ranks together."""
        assert self.trainer is not None
        shares = self.trainer.env.gather([(points.cpu(), labels.cpu()) for points, labels in self._seen])
        self._seen = []
        points, labels = (torch.cat(parts) for parts in zip(*(pair for share in shares for pair in share), strict=True))
        return {"recall_at_1": float(nearest_hits(points, labels).float().mean())}

    def predict_step(self, batch: Batch) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def nt_xent(points: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the mean over pictures of -log(share of a picture of its class), a mean over those: shares are the softmax
    of similarities to all other pictures of the batch. Pictures without a partner in the batch are left out."""
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    similar = (points @ points.T / temperature).masked_fill(itself, -torch.inf)
    log_share = similar.log_softmax(1)
    partners = (labels[:, None] == labels[None, :]) & ~itself
    count = partners.sum(1)
    terms = -log_share.masked_fill(~partners, 0.0).sum(1) / count.clamp(min=1)
    return terms.sum() / (count > 0).sum().clamp(min=1)


def nearest_hits(points: Tensor, labels: Tensor) -> Tensor:
    """Return for each picture whether the nearest other one is of its class."""
    hits = []
    for start in range(0, len(points), ROWS):
        distances = torch.cdist(points[start : start + ROWS], points)
        rows = torch.arange(len(distances), device=points.device)
        distances[rows, start + rows] = torch.inf
        hits.append(labels[distances.argmin(1)] == labels[start : start + ROWS])
    return torch.cat(hits)


def fashion_pictures(batch_size: int = 128, train: int = 10_000, val: int = 2_000, root: str | None = None) -> Splits:
    """Load the first `train` and the last `val` training pictures of FashionMNIST, and all test pictures for
    `forge test`. The data are found as by `fashion_mnist`."""
    folder = find_files(root)
    images, labels = read_part(folder, "train")
    if train + val > len(labels):
        raise forge.DataError(
            f"fashion_pictures: train={train} and val={val} are more than the {len(labels):,} pictures there are."
        )
    return Splits(
        train=TensorLoader(images[:train], labels[:train], batch_size=batch_size, shuffle=True),
        val=TensorLoader(images[-val:], labels[-val:], batch_size=500),
        test=TensorLoader(*read_part(folder, "t10k"), batch_size=500),
    )
