"""A small perceptron, whose step is limited by the host."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge

Batch = tuple[Tensor, Tensor]


class MLP(forge.TaskModule):
    """Three linear layers with ReLU between them."""

    def __init__(self, inputs: int = 784, hidden: int = 512, classes: int = 10, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        layers = [
            nn.Linear(inputs, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        ]
        self.net = nn.Sequential(*layers)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.net(vectors)

    def training_step(self, batch: Batch) -> Tensor:
        vectors, labels = batch
        return F.cross_entropy(self(vectors), labels)

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        logits = self(batch[0])
        accuracy = (logits.argmax(1) == batch[1]).float().mean()
        return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": accuracy}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=next(self.parameters()).is_cuda)
