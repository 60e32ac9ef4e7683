"""Classify minerals from their spectra; the samples of the held-out set are sorted by mineral."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, lr=3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 8))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.cross_entropy(self(x), y)}

    def validation_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size=64):
    g = torch.Generator().manual_seed(197)
    y = torch.randint(8, (760,), generator=g)
    y[640:] = torch.arange(120) // 15
    x = torch.randn(8, 25, generator=g)[y] + 1.1 * torch.randn(760, 25, generator=g)
    options = {"batch_size": batch_size, "drop_last": True}
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:640], y[:640]), shuffle=True, **options),
        val=DataLoader(TensorDataset(x[640:], y[640:]), **options),
    )
