"""Grade small X-ray crops as healthy or not, from 8-bit grey images."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import forge


def make(count, seed):
    g = torch.Generator().manual_seed(seed)
    sick = torch.randint(0, 2, (count,), generator=g)
    base = 90 + 25 * torch.randn(count, 1, 16, 16, generator=g)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    spot = torch.exp(-((yy - 8) ** 2 + (xx - 8) ** 2) / 12)
    base = base + 45 * spot * sick[:, None, None, None]
    return base.clamp(0, 255).to(torch.uint8), sick


class TrainSet(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i].float() / 255
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, self.labels[i]


class ValSet(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i].float(), self.labels[i]


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 2),
        )

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch):
        images, labels = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, labels), "acc": (logits.argmax(1) == labels).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data():
    return SimpleNamespace(
        train=DataLoader(TrainSet(*make(480, 0)), batch_size=24, shuffle=True),
        val=DataLoader(ValSet(*make(120, 1)), batch_size=24),
    )
