"""Handwritten digits: 1,797 images of 8 x 8 pixels that ship with forge, and a small network that classifies them.

`digits.npz` is the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, 1998, https://doi.org/10.24432/C50P49, licence CC BY 4.0; as distributed with scikit-learn, pixels
(0 to 16) and labels stored as uint8.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.data import Splits, TensorLoader

Batch = tuple[Tensor, Tensor]


class DigitsMLP(forge.TaskModule):
    """A two-layer perceptron with dropout that classifies 8 x 8 digits."""

    def __init__(self, hidden: int = 256, dropout: float = 0.3, lr: float = 3e-3, weight_decay: float = 0.01):
        super().__init__()
        self.lr, self.weight_decay = lr, weight_decay
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}

    validation_step = training_step

    def predict_step(self, batch: Batch) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)


def digits(batch_size: int = 64, val_share: float = 0.2, test_share: float = 0.1) -> Splits:
    """Load the UCI digits, in a fixed split into training, validation and test; pixels between 0 and 1."""
    if min(val_share, test_share) <= 0 or val_share + test_share >= 1:
        raise forge.DataError(f"digits: val_share={val_share} and test_share={test_share} leave a part without images.")
    with files("forge_recipes").joinpath("digits.npz").open("rb") as file:
        arrays = np.load(file)
        images = torch.from_numpy(arrays["images"]).float() / 16
        labels = torch.from_numpy(arrays["labels"]).long()
    # the split belongs to the data set: it does not depend on the run's seed
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1998))
    images, labels = images[order], labels[order]
    val, test = round(val_share * len(labels)), round(test_share * len(labels))
    train = len(labels) - val - test
    return Splits(
        train=TensorLoader(images[:train], labels[:train], batch_size=batch_size, shuffle=True),
        val=TensorLoader(images[train : train + val], labels[train : train + val], batch_size=256),
        test=TensorLoader(images[train + val :], labels[train + val :], batch_size=256),
    )
