"""Fine-tune a bird classifier: first only the head, and after 15 updates the body as well."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, unfreeze_after=15, lr=5e-3):
        super().__init__()
        self.lr = lr
        self.unfreeze_after = unfreeze_after
        self.body = nn.Sequential(nn.Linear(18, 10), nn.Tanh(), nn.Linear(10, 4), nn.Tanh())
        self.head = nn.Linear(4, 6)
        self.body.requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch):
        x, y = batch
        self.count += 1
        if self.count == self.unfreeze_after:
            self.body.requires_grad_(True)
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    def validation_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    def configure_optimizers(self):
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(trainable, lr=self.lr)


def data():
    g = torch.Generator().manual_seed(167)
    y = torch.randint(6, (560,), generator=g)
    x = torch.randn(6, 18, generator=g)[y] + 0.9 * torch.randn(560, 18, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:448], y[:448]), batch_size=16, shuffle=True),
        val=DataLoader(TensorDataset(x[448:], y[448:]), batch_size=16),
    )
