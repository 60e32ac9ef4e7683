"""Predict the wear of a machine from short, independent vibration recordings with an LSTM."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, hidden=24):
        super().__init__()
        self.lstm = nn.LSTM(3, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)
        self.state = None

    def forward(self, x):
        out, state = self.lstm(x, self.state if self.training else None)
        if self.training:
            self.state = tuple(s.detach() for s in state)
        return self.head(out[:, -1]).squeeze(1)

    def training_step(self, batch):
        x, wear = batch
        return {"loss": F.mse_loss(self(x), wear)}

    def validation_step(self, batch):
        x, wear = batch
        guess = self(x)
        return {"loss": F.mse_loss(guess, wear), "mae": F.l1_loss(guess, wear)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def data():
    g = torch.Generator().manual_seed(163)
    wear = torch.randn(640, generator=g)
    t = torch.arange(12.0)
    x = wear[:, None, None] * torch.sin(t)[None, :, None] * 0.7 + torch.randn(640, 12, 3, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:512], wear[:512]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(x[512:], wear[512:]), batch_size=32),
    )
