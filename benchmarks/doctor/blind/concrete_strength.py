"""Predict the compressive strength of concrete from its mixture."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, hidden=48, lr=5e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, mix):
        return self.net(mix)

    def training_step(self, batch):
        mix, strength = batch
        error = self(mix) - strength
        return {"loss": (error**2).mean(), "mae": error.abs().mean()}

    def validation_step(self, batch):
        return self.training_step(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data():
    g = torch.Generator().manual_seed(11)
    mix = torch.randn(640, 8, generator=g)
    w = torch.randn(8, generator=g)
    strength = torch.tanh(mix @ w * 0.5) + 0.5 * mix[:, 0] * mix[:, 1] + 0.05 * torch.randn(640, generator=g)
    strength = (strength - strength.mean()) / strength.std()
    train = TensorDataset(mix[:512], strength[:512])
    val = TensorDataset(mix[512:], strength[512:])
    return SimpleNamespace(
        train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32)
    )
