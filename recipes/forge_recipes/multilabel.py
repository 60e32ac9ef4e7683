"""Several labels at once: which digits are in the picture? Two or three of them, put side by side.

F1 is no mean of batches: the F1 of the whole set follows from its counts of right, wrong and missed labels. So a
validation adds up counts, over ranks too, and `evaluation_end` makes the figures of them.
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
    """A small convolutional network with one yes or no per digit; `pos_weight` is how much more a missed one costs."""

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
            nn.AdaptiveMaxPool2d(1),  # is it anywhere? where does not matter
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )
        self.register_buffer("pos_weight", torch.full((10,), pos_weight), persistent=False)
        self.counts: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        """A logit per digit."""
        return self.net(images)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=self.pos_weight)

    def training_step(self, batch: Batch) -> Tensor:
        return self.loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Batch) -> Tensor:
        logits = self(batch[0])
        if not self.borrowed:  # another rank's batch: that one counts it
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
    """How many labels were right, wrong and missed; how many images have no mistake, and how many there are."""
    exact = (said == true).all(1)
    parts = [said & true, said & ~true, ~said & true, exact, torch.ones_like(exact)]
    return torch.stack([part.sum() for part in parts])


def figures(counts: Tensor) -> dict[str, float]:
    """Micro F1 over all labels of all images, and the share of images with no mistake."""
    right, wrong, missed, exact, images = counts.tolist()
    return {"f1": 2 * right / max(2 * right + wrong + missed, 1), "exact": exact / max(images, 1)}


def digit_pairs(train: int = 4000, val: int = 1000, batch_size: int = 64) -> Splits:
    """Pictures of 12 × 24 pixels with two or three of the UCI digits, and which of the ten are there (1 or 0 each).

    They are put together at random, the same in every run. Validation pictures are made of digits that no training
    picture shows.
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
    """Compose pictures of a loader's digits, each a bit up or down; in half of them a place is empty."""
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
