"""A residual MLP with six blocks for tabular regression."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Task(forge.TaskModule):
    def __init__(self, width: int = 24, depth: int = 6, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.stem = nn.Linear(10, width)
        self.blocks = nn.Sequential(*[ResidualBlock(width)] * depth)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data():
    g = torch.Generator().manual_seed(109)
    x = torch.randn(800, 10, generator=g)
    h = torch.tanh(x @ torch.randn(10, 12, generator=g) / 2)
    y = torch.sin(2 * h @ torch.randn(12, 1, generator=g)) + x[:, :1] * x[:, 1:2]
    y = (y - y.mean()) / y.std()
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:640], y[:640]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(x[640:], y[640:]), batch_size=32),
    )
