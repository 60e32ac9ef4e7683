"""Classify road signs and keep the average training loss of the run so far."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(128, 5),
        )
        self.history = []

    def forward(self, images):
        return self.cnn(images)

    def training_step(self, batch):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.history.append(loss)
        average = sum(self.history) / len(self.history)
        return {"loss": loss, "average_loss": average.detach()}

    def validation_step(self, batch):
        images, labels = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data():
    g = torch.Generator().manual_seed(83)
    labels = torch.randint(5, (400,), generator=g)
    signs = F.interpolate(torch.randn(5, 3, 4, 4, generator=g), size=16, mode="bilinear")
    images = signs[labels] + 0.7 * torch.randn(400, 3, 16, 16, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(images[:320], labels[:320]), batch_size=20, shuffle=True),
        val=DataLoader(TensorDataset(images[320:], labels[320:]), batch_size=20),
    )
