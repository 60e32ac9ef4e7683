"""Multi-label classification: which digits are in a picture of two or three, side by side?

F1 is not a mean over batches: it follows from the counts of right, wrong and missed labels over the whole set. So a
validation sums counts, also over ranks, and `evaluation_end` computes the metrics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge.data import Splits, TensorLoader
from forge_recipes.digits import digits

Batch = tuple[Tensor, Tensor]


class Multilabel(forge.TaskModule):
    """A small convolutional network with one binary output per digit; `pos_weight` is the cost of a missed digit."""

    pos_weight: Tensor

    def __init__(self, width: int = 32, pos_weight: float = 2.0, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(1),  # whether it is anywhere; the position does not matter
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )
        self.register_buffer("pos_weight", torch.full((10,), pos_weight), persistent=False)
        self.counts: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        """Return a logit per digit."""
        return self.net(images)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=self.pos_weight)

    def training_step(self, batch: Batch) -> Tensor:
        return self.loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Batch) -> Tensor:
        logits = self(batch[0])
        if not self.is_padding:  # a padding batch: another rank counts it
            self.counts.append(count(logits > 0, batch[1].bool()))
        return self.loss(logits, batch[1])

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        assert self.trainer is not None
        env = self.trainer.env
        counts = env.sum(sum(self.counts, torch.zeros(5, dtype=torch.long, device=env.device)))
        self.counts = []
        return figures(counts)

    def predict_step(self, batch: Batch) -> Tensor:
        return self(batch[0]) > 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def count(said: Tensor, true: Tensor) -> Tensor:
    """Count right, wrong and missed labels, images without a mistake, and all images."""
    exact = (said == true).all(1)
    parts = [said & true, said & ~true, ~said & true, exact, torch.ones_like(exact)]
    return torch.stack([part.sum() for part in parts])


def figures(counts: Tensor) -> dict[str, float]:
    """Return micro F1 over all labels of all images, and the share of images without a mistake."""
    right, wrong, missed, exact, images = counts.tolist()
    return {"f1": 2 * right / max(2 * right + wrong + missed, 1), "exact": exact / max(images, 1)}


def digit_pairs(train: int = 4000, val: int = 1000, batch_size: int = 64) -> Splits:
    """Make pictures of 12 × 24 pixels with two or three of the UCI digits, and ten labels, 1 for each digit shown.

    They are composed at random, the same in every run. Validation pictures use digits that no training picture shows.
    """
    single = digits()
    assert isinstance(single.train, TensorLoader)
    assert isinstance(single.val, TensorLoader)
    make = torch.Generator().manual_seed(1998)
    return Splits(
        train=TensorLoader(*side_by_side(single.train, train, make), batch_size=batch_size, shuffle=True),
        val=TensorLoader(*side_by_side(single.val, val, make), batch_size=256),
    )


def side_by_side(single: TensorLoader, samples: int, make: torch.Generator) -> Batch:
    """Compose pictures of a loader's digits, each shifted vertically; in half of them one of three places is empty."""
    images, labels = single.tensors
    pictures, present = torch.zeros(samples, 1, 12, 24), torch.zeros(samples, 10)
    for sample in range(samples):
        chosen = torch.randint(len(labels), (3,), generator=make).tolist()
        tops = torch.randint(5, (3,), generator=make).tolist()
        empty = int(torch.randint(6, (), generator=make))
        for place, (digit, top) in enumerate(zip(chosen, tops, strict=True)):
            if place != empty:
                pictures[sample, 0, top : top + 8, 8 * place : 8 * place + 8] = images[digit]
                present[sample, labels[digit]] = 1
    return pictures, present
