"""Distil a big, fixed teacher into a small student, from its soft answers only."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


def centres():
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(99))


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centres", centres())
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return -0.5 * torch.cdist(self.dropout(x), self.centres) ** 2


class Task(forge.TaskModule):
    def __init__(self, temperature=2.0):
        super().__init__()
        self.t = temperature
        self.teacher = Teacher().eval()
        self.student = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 6))

    def forward(self, x):
        return self.student(x)

    def distillation(self, x):
        with torch.no_grad():
            wanted = F.softmax(self.teacher(x) / self.t, dim=1)
        got = F.log_softmax(self.student(x) / self.t, dim=1)
        return F.kl_div(got, wanted, reduction="batchmean") * self.t**2

    def training_step(self, batch):
        return {"loss": self.distillation(batch[0])}

    def validation_step(self, batch):
        x, y = batch
        return {"loss": self.distillation(x), "accuracy": (self(x).argmax(1) == y).float().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.student.parameters(), lr=3e-3)


def data():
    g = torch.Generator().manual_seed(12)
    y = torch.randint(6, (600,), generator=g)
    x = centres()[y] + 1.2 * torch.randn(600, 16, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:480], y[:480]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(x[480:], y[480:]), batch_size=24),
    )
