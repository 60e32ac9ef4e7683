"""Find the one box in an image: a CNN regresses its centre, width and height as fractions of the image."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


def iou(a, b):
    left_top = torch.maximum(a[:, :2], b[:, :2])
    right_bottom = torch.minimum(a[:, 2:], b[:, 2:])
    shared = (right_bottom - left_top).clamp(min=0).prod(1)
    area_a = (a[:, 2:] - a[:, :2]).clamp(min=0).prod(1)
    area_b = (b[:, 2:] - b[:, :2]).clamp(min=0).prod(1)
    return shared / (area_a + area_b - shared).clamp(min=1e-6)


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(16 * 36, 64), nn.ReLU(), nn.Linear(64, 4), nn.Sigmoid(),
        )

    def forward(self, image):
        return self.net(image)

    def training_step(self, batch):
        image, box = batch
        return {"loss": F.l1_loss(self(image), box)}

    def validation_step(self, batch):
        image, box = batch
        guess = self(image)
        return {"loss": F.l1_loss(guess, box), "iou": iou(guess, box).mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def data():
    g = torch.Generator().manual_seed(81)
    size = 0.2 + 0.3 * torch.rand(480, 2, generator=g)
    centre = size / 2 + (1 - size) * torch.rand(480, 2, generator=g)
    grid = (torch.arange(24) + 0.5) / 24
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    inside = ((xx - centre[:, 0, None, None]).abs() < size[:, 0, None, None] / 2) & (
        (yy - centre[:, 1, None, None]).abs() < size[:, 1, None, None] / 2
    )
    image = inside.float()[:, None] * 2 - 0.5 + 0.3 * torch.randn(480, 1, 24, 24, generator=g)
    box = torch.cat([centre, size], 1)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(image[:384], box[:384]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(image[384:], box[384:]), batch_size=24),
    )
