"""Separate two concentric rings of points with a deep network."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, sizes=(2, 32, 32, 32, 2)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, points):
        for layer in self.layers:
            points = layer(points)
        return points

    def training_step(self, batch):
        points, ring = batch
        logits = self(points)
        return {"loss": F.cross_entropy(logits, ring), "accuracy": (logits.argmax(1) == ring).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def data():
    g = torch.Generator().manual_seed(137)
    ring = torch.randint(2, (600,), generator=g)
    angle = 6.2832 * torch.rand(600, generator=g)
    radius = 0.6 + 0.9 * ring + 0.15 * torch.randn(600, generator=g)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(points[:480], ring[:480]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(points[480:], ring[480:]), batch_size=24),
    )
