"""Predict the temperature anomaly (in standard deviations) at a station from its neighbours."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


def stack(widths):
    layers = []
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers)


class Task(forge.TaskModule):
    def __init__(self, lr=3e-3):
        super().__init__()
        self.lr = lr
        self.net = stack([12, 48, 48, 1])

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.smooth_l1_loss(self(x), y)}

    def validation_step(self, batch):
        x, y = batch
        guess = self(x)
        r2 = 1 - (guess - y).square().mean() / y.var()
        return {"loss": F.smooth_l1_loss(guess, y), "r2": r2}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data():
    g = torch.Generator().manual_seed(14)
    x = torch.randn(600, 12, generator=g)
    y = x @ torch.randn(12, 1, generator=g) + torch.sin(2 * x[:, :1])
    y = (y - y.mean()) / y.std() + 0.1 * torch.randn(600, 1, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:480], y[:480]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(x[480:], y[480:]), batch_size=24),
    )
