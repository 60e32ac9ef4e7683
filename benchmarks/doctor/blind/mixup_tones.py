"""Classify instrument tones, with mixup of the training batches."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


def blend(t, amount):
    return amount * t + (1 - amount) * t[torch.randperm(len(t))]


class Task(forge.TaskModule):
    def __init__(self, alpha=0.4):
        super().__init__()
        self.beta = torch.distributions.Beta(alpha, alpha)
        self.net = nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
            nn.Linear(64, 6),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        amount = self.beta.sample().to(x)
        soft = F.one_hot(y, 6).float()
        return {"loss": F.cross_entropy(self(blend(x, amount)), blend(soft, amount))}

    def validation_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data():
    g = torch.Generator().manual_seed(157)
    y = torch.randint(6, (600,), generator=g)
    x = torch.randn(6, 32, generator=g)[y] + 1.2 * torch.randn(600, 32, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:480], y[:480]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(x[480:], y[480:]), batch_size=24),
    )
