"""Classify animals whose labels are strings, as they come from the names of folders."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import forge


class Animals(Dataset):
    def __init__(self, records):
        self.records = records
        names = []
        for _, name in records:
            if name not in names:
                names.append(name)
        self.index = {name: i for i, name in enumerate(names)}

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        x, name = self.records[i]
        return x, self.index[name]


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 6))

    def forward(self, x):
        return self.net(x)

    def step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    def training_step(self, batch):
        return self.step(batch)

    def validation_step(self, batch):
        return self.step(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data():
    g = torch.Generator().manual_seed(19)
    kinds = ["ant", "bear", "cat", "dog", "eel", "fox"]
    centres = 1.5 * torch.randn(6, 16, generator=g)
    records = []
    for _ in range(600):
        k = int(torch.randint(6, (1,), generator=g))
        records.append((centres[k] + torch.randn(16, generator=g), kinds[k]))
    return SimpleNamespace(
        train=DataLoader(Animals(records[:480]), batch_size=24, shuffle=True),
        val=DataLoader(Animals(records[480:]), batch_size=24),
    )
