"""MNIST: 70,000 handwritten digits, 28 × 28 pixels; 60,000 to train on and 10,000 to test, and a small network.

By Y. LeCun, C. Cortes and C. Burges. The four files are read compressed or not, as those of FashionMNIST are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge.data import Splits
from forge_recipes.fashion_mnist import idx_splits

Batch = tuple[Tensor, Tensor]

MEAN, STD = 0.1307, 0.3081
"""Mean and deviation of the pixels of the 60,000 training images, between 0 and 1."""


class MnistCNN(forge.TaskModule):
    """Two convolutions, pooling, and two linear layers, with dropout; trained with AdamW."""

    def __init__(self, width: int = 32, hidden: int = 128, dropout: float = 0.25, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(2 * width * 12 * 12, hidden),
            nn.ReLU(),
            nn.Dropout(2 * dropout),
            nn.Linear(hidden, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}

    validation_step = training_step

    def predict_step(self, batch: Batch) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def mnist(batch_size: int = 128, root: str | None = None, val_share: float = 0.1, device: str | None = None) -> Splits:
    """Load MNIST, normalised. `root` is the folder with MNIST/raw (default: $FORGE_DATA, or a download).

    `val_share` of the training images, the same in every run, is held out for validation; the test set is for
    `forge test`. With 0, validation is the test set. `device` holds the images.
    """
    return idx_splits("MNIST", batch_size, root, val_share, device, MEAN, STD)
