"""The classic first lab: a perceptron with two hidden layers classifies clothes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge_recipes.fashion_mnist import CLASSES, MEAN, STD
from forge_recipes.looks import Looks

Batch = tuple[Tensor, Tensor]


class FashionMLP(forge.TaskModule):
    """784-256-256-10 with ReLU and dropout, trained with Adam; `fused` runs its update in one kernel."""

    def __init__(self, hidden: int = 256, dropout: float = 0.2, lr: float = 1e-3, fused: bool = False):
        super().__init__()
        self.lr, self.fused = lr, fused
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
        )
        self.head = nn.Linear(hidden, 10)
        self.looks = Looks(CLASSES, MEAN, STD)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        return scores(self(images), labels)

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(images)
        hidden = self.body(images[: self.looks.points]) if self.looks.begins() else None
        if not self.is_padding:
            self.looks.add(images, labels, logits, hidden)
        return scores(logits, labels)

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        assert self.trainer is not None
        return self.looks.finish(self.trainer.env)

    def predict_step(self, batch: Batch) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr, fused=self.fused or None)


def scores(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the loss and the accuracy."""
    return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}
