"""Classify shells of which some kinds are rare, with a sampler that draws all kinds equally often."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import forge


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(15, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    def validation_step(self, batch):
        return self.training_step(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data():
    g = torch.Generator().manual_seed(191)
    share = torch.linspace(1, 4, 12)
    y = torch.multinomial(share, 800, replacement=True, generator=g)
    x = 1.3 * torch.randn(12, 15, generator=g)[y] + torch.randn(800, 15, generator=g)
    train_x, train_y = x[:640], y[:640]
    weights = 1.0 / torch.bincount(train_y, minlength=12).float()
    sampler = WeightedRandomSampler(weights, num_samples=len(train_y), replacement=True)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(train_x, train_y), batch_size=32, sampler=sampler),
        val=DataLoader(TensorDataset(x[640:], y[640:]), batch_size=32),
    )
