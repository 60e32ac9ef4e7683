"""Classify plankton images, logging the deterministic accuracy on each training batch."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            block(1, 12), block(12, 24), nn.Flatten(), nn.Dropout(0.3), nn.Linear(24 * 16, 4)
        )

    def accuracy(self, images, labels):
        self.net.eval()
        with torch.no_grad():
            hits = self.net(images).argmax(1) == labels
        return hits.float().mean()

    def training_step(self, batch):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        return {"loss": loss, "accuracy": self.accuracy(images, labels)}

    def validation_step(self, batch):
        images, labels = batch
        return {"loss": F.cross_entropy(self.net(images), labels), "accuracy": self.accuracy(images, labels)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def data():
    g = torch.Generator().manual_seed(33)
    n = 480
    labels = torch.randint(4, (n,), generator=g)
    forms = F.avg_pool2d(torch.randn(4, 1, 20, 20, generator=g), 5, 1)
    forms = 2 * forms / forms.std()
    images = 4 + forms[labels] + 5 * torch.randn(n, 1, 16, 16, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(images[:384], labels[:384]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(images[384:], labels[384:]), batch_size=24),
    )
