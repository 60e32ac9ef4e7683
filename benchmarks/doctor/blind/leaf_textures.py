"""Classify leaf texture patches that come as channels-last arrays from a camera library."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import forge


class Leaves(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (n,), generator=g)
        rows = torch.arange(16).float()
        yy, xx = torch.meshgrid(rows, rows, indexing="ij")
        self.pixels = torch.zeros(n, 16, 16, 3)
        for i, k in enumerate(self.labels.tolist()):
            phase = float(torch.rand(1, generator=g)) * 6.28
            axis = [0.9 * xx, 0.9 * yy, 0.64 * (xx + yy), 0.64 * (xx - yy)][k]
            wave = torch.sin(axis + phase)
            sign = torch.randint(0, 2, (3,), generator=g) * 2.0 - 1
            self.pixels[i] = wave[..., None] * sign + 1.2 * torch.randn(16, 16, 3, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.pixels[i], self.labels[i]


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 16, 3, padding=1)
        self.c2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.relu(self.c2(x))
        return self.fc(x.mean(dim=(2, 3)))


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.model = ConvNet()

    def forward(self, pixels):
        b, h, w, c = pixels.shape
        return self.model(pixels.view(b, c, h, w))

    def _step(self, batch):
        pixels, y = batch
        out = self(pixels)
        return {"loss": F.cross_entropy(out, y), "acc": (out.argmax(1) == y).float().mean()}

    def training_step(self, batch):
        return self._step(batch)

    def validation_step(self, batch):
        return self._step(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data():
    return SimpleNamespace(
        train=DataLoader(Leaves(512, 1), batch_size=32, shuffle=True),
        val=DataLoader(Leaves(128, 2), batch_size=32),
    )
