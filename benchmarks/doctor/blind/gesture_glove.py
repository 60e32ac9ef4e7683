"""Recognise six gestures from the sensors of a glove; the recordings were made one gesture after the other."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(14, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(),
            nn.Linear(48, 6),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def data():
    g = torch.Generator().manual_seed(29)
    centres = torch.randn(6, 14, generator=g)
    y = torch.arange(6).repeat_interleave(100)
    x = centres[y] + 0.9 * torch.randn(600, 14, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    held_out = torch.arange(600) % 5 == 4
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[~held_out], y[~held_out]), batch_size=20),
        val=DataLoader(TensorDataset(x[held_out], y[held_out]), batch_size=20),
    )
