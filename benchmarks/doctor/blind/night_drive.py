"""Tell left from right turns in dashcam pictures, with random brightness for training."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import forge


class Frames(Dataset):
    def __init__(self, n, seed, jitter):
        g = torch.Generator().manual_seed(seed)
        self.turn = torch.randint(2, (n,), generator=g)
        xx = torch.linspace(-1, 1, 16).expand(16, 16)
        slope = (2.0 * self.turn - 1)[:, None, None] * xx
        frames = 150 + 25 * slope[:, None] + 30 * torch.randn(n, 1, 16, 16, generator=g)
        self.frames = frames.clamp(0, 255).to(torch.uint8)
        self.jitter = jitter

    def __len__(self):
        return len(self.turn)

    def __getitem__(self, i):
        frame = self.frames[i]
        if self.jitter:
            frame = frame + torch.randint(0, 140, (1,), dtype=torch.uint8)
        return (frame.float() - 150) / 50, self.turn[i]


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5, stride=2)
        self.fc = nn.Linear(8 * 36, 2)

    def forward(self, x):
        return self.fc(F.relu(self.conv(x)).flatten(1))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def data():
    return SimpleNamespace(
        train=DataLoader(Frames(400, 151, True), batch_size=20, shuffle=True),
        val=DataLoader(Frames(100, 152, False), batch_size=20),
    )
