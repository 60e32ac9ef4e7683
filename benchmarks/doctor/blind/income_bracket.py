"""Predict whether a household is above the median income from census columns."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.lr = lr
        self.fc1 = nn.Linear(6, 32)
        self.fc2 = nn.Linear(32, 16)
        self.fc3 = nn.Linear(16, 1)

    def forward(self, x):
        x = torch.tanh(self.fc1(x))
        x = torch.tanh(self.fc2(x))
        return self.fc3(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        logit = self(x)
        return {
            "loss": F.binary_cross_entropy_with_logits(logit, y),
            "accuracy": ((logit > 0).float() == y).float().mean(),
        }

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def data():
    g = torch.Generator().manual_seed(113)
    n = 800
    age = 20 + 50 * torch.rand(n, generator=g)
    schooling = torch.randint(6, 20, (n,), generator=g).float()
    hours = 10 + 50 * torch.rand(n, generator=g)
    capital = 60000 * torch.rand(n, generator=g)
    zip_income = 20000 + 50000 * torch.rand(n, generator=g)
    children = torch.randint(0, 5, (n,), generator=g).float()
    score = (
        (schooling - 13) / 4 + (hours - 35) / 15 + 0.7 * (age - 45) / 15 - 0.4 * (children - 2)
        + 0.3 * (capital - 30000) / 17000 + 0.3 * torch.randn(n, generator=g)
    )
    y = (score > score.median()).float()
    x = torch.stack([age, schooling, hours, capital, zip_income, children], 1)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:640], y[:640]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(x[640:], y[640:]), batch_size=32),
    )
