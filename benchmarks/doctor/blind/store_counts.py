"""Predict how many customers visit a shop in an hour, with a Poisson likelihood."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class RateNet(nn.Module):
    """Gives the expected number of customers, a positive number."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return F.softplus(self.body(x)).squeeze(-1)


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.rate = RateNet()
        self.nll = nn.PoissonNLLLoss()

    def forward(self, x):
        return self.rate(x)

    def training_step(self, batch):
        x, count = batch
        return {"loss": self.nll(self(x), count)}

    def validation_step(self, batch):
        x, count = batch
        rate = self(x)
        return {"loss": self.nll(rate, count), "mae": (rate - count).abs().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def data():
    g = torch.Generator().manual_seed(127)
    x = torch.randn(700, 7, generator=g)
    rate = torch.exp(1.2 + 0.3 * x @ torch.randn(7, generator=g))
    count = torch.poisson(rate, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:560], count[:560]), batch_size=28, shuffle=True),
        val=DataLoader(TensorDataset(x[560:], count[560:]), batch_size=28),
    )
