"""Recognise the activity of a person from the accelerometer of a phone with a 1D CNN."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(3, 24, 5, padding=2)
        self.conv2 = nn.Conv1d(24, 24, 5, padding=2)
        self.fc1 = nn.Linear(24 * 8, 48)
        self.fc2 = nn.Linear(48, 5)

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.conv1(x)), 2)
        x = F.max_pool1d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, 0.5)
        return self.fc2(x)

    def training_step(self, batch):
        signal, activity = batch
        return F.cross_entropy(self(signal), activity)

    def validation_step(self, batch):
        signal, activity = batch
        logits = self(signal)
        return {
            "loss": F.cross_entropy(logits, activity),
            "accuracy": (logits.argmax(1) == activity).float().mean(),
        }

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def data():
    g = torch.Generator().manual_seed(2)
    labels = torch.randint(5, (640,), generator=g)
    t = torch.arange(32.0)
    frequency = torch.tensor([0.2, 0.4, 0.6, 0.9, 1.3])[labels]
    phase = 6.28 * torch.rand(640, 3, 1, generator=g)
    signal = torch.sin(frequency[:, None, None] * t + phase) + 0.6 * torch.randn(640, 3, 32, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(signal[:512], labels[:512]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(signal[512:], labels[512:]), batch_size=32),
    )
