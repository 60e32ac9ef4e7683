"""Train only a new head on a feature extractor that was trained elsewhere and has to stay as it is."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


def pretrained_backbone():
    g = torch.Generator().manual_seed(123)
    net = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=g) / (p.shape[-1] ** 0.5))
    return net


class Task(forge.TaskModule):
    def __init__(self, lr=3e-2):
        super().__init__()
        self.lr = lr
        self.backbone = pretrained_backbone()
        for p in self.backbone.parameters():
            p.require_grad = False
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def data():
    g = torch.Generator().manual_seed(6)
    y = torch.randint(5, (480,), generator=g)
    x = 1.2 * torch.randn(5, 24, generator=g)[y] + torch.randn(480, 24, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:384], y[:384]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(x[384:], y[384:]), batch_size=24),
    )
