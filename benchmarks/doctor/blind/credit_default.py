"""Probability that a loan defaults, from tabular data, with a linear warmup of the learning rate."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, lr: float = 5e-3, warmup: int = 60):
        super().__init__()
        self.lr, self.warmup = lr, warmup
        self.net = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch):
        x, default = batch
        return {"loss": F.binary_cross_entropy_with_logits(self(x), default)}

    def validation_step(self, batch):
        x, default = batch
        logit = self(x)
        return {
            "loss": F.binary_cross_entropy_with_logits(logit, default),
            "accuracy": ((logit > 0) == (default > 0.5)).float().mean(),
        }

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = LambdaLR(optimizer, lambda step: min(1, (step + 1) // self.warmup))
        return optimizer, schedule


def data():
    g = torch.Generator().manual_seed(40)
    x = torch.randn(800, 10, generator=g)
    score = x[:, 0] * x[:, 1] + x[:, 2] - 0.7 * x[:, 3].abs() + 0.3 * torch.randn(800, generator=g)
    default = (score > 0).float()
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:640], default[:640]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(x[640:], default[640:]), batch_size=32),
    )
