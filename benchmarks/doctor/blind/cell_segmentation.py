"""Segment round cells in microscope images with a little U-Net and random flips."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import forge


class Cells(Dataset):
    def __init__(self, count, seed, augment):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        centre = 3 + 10 * torch.rand(count, 2, 1, 1, generator=g)
        radius = 2 + 2 * torch.rand(count, 1, 1, generator=g)
        inside = (yy - centre[:, 0]) ** 2 + (xx - centre[:, 1]) ** 2 < radius**2
        self.masks = inside.float()[:, None]
        self.images = 1.5 * self.masks - 0.4 + 0.5 * torch.randn(count, 1, 16, 16, generator=g)
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image, mask = self.images[i], self.masks[i]
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(-1)
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(-2)
        return image, mask


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.d1, self.d2 = conv(1, 8), conv(8, 16)
        self.u1 = conv(24, 8)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        b = F.interpolate(b, scale_factor=2)
        return self.last(self.u1(torch.cat([a, b], 1)))

    def training_step(self, batch):
        image, mask = batch
        return {"loss": F.binary_cross_entropy_with_logits(self(image), mask)}

    def validation_step(self, batch):
        image, mask = batch
        logits = self(image)
        guess = logits > 0
        both = (guess & (mask > 0)).sum()
        either = (guess | (mask > 0)).sum()
        return {"loss": F.binary_cross_entropy_with_logits(logits, mask), "iou": both / either.clamp(min=1)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data():
    return SimpleNamespace(
        train=DataLoader(Cells(400, 1, True), batch_size=16, shuffle=True),
        val=DataLoader(Cells(96, 2, False), batch_size=16),
    )
