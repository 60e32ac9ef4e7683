"""Detect the few fraudulent payments among many, with a weighted cross-entropy."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


def payments():
    g = torch.Generator().manual_seed(31)
    fraud = (torch.rand(1000, generator=g) < 0.1).long()
    x = torch.randn(1000, 12, generator=g)
    x[:, :4] += 1.1 * fraud[:, None]
    return x, fraud


class Task(forge.TaskModule):
    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
        _, fraud = payments()
        counts = torch.bincount(fraud[:800], minlength=2).float()
        self.register_buffer("weight", 2 * counts / counts.sum())

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, fraud = batch
        return {"loss": F.cross_entropy(self(x), fraud, weight=self.weight)}

    def validation_step(self, batch):
        x, fraud = batch
        flagged = self(x).argmax(1)
        recall = (flagged * fraud).sum() / fraud.sum().clamp(min=1)
        specificity = ((1 - flagged) * (1 - fraud)).sum() / (1 - fraud).sum().clamp(min=1)
        return {"balanced_accuracy": (recall + specificity) / 2, "recall": recall}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data():
    x, fraud = payments()
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:800], fraud[:800]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(x[800:], fraud[800:]), batch_size=200),
    )
