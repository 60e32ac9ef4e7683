"""Predict the bikes that will be rented in the next hour from the hours before and the weather."""

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


def table(hours=900):
    rng = np.random.default_rng(47)
    clock = np.arange(hours)
    weather = np.convolve(rng.normal(size=hours + 5), np.ones(6) / 6, mode="valid")
    rented = 2 + np.sin(clock * 2 * np.pi / 24) + 0.8 * weather + 0.7 * rng.normal(size=hours)
    smooth = np.convolve(rented, np.ones(3) / 3, mode="same")
    columns = {
        "sin": np.sin(clock * 2 * np.pi / 24),
        "cos": np.cos(clock * 2 * np.pi / 24),
        "weather": weather,
        "last_hour": np.roll(rented, 1),
        "hour_before": np.roll(rented, 2),
        "yesterday": np.roll(rented, 24),
        "trend": smooth,
    }
    x = np.stack(list(columns.values()), 1)[24:-1]
    y = rented[24:-1]
    return torch.tensor(x, dtype=torch.float), torch.tensor(y, dtype=torch.float)


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x)[:, 0]

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data():
    x, y = table()
    cut = 700
    mean, std = x[:cut].mean(0), x[:cut].std(0)
    x = (x - mean) / std
    y = (y - y[:cut].mean()) / y[:cut].std()
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:cut], y[:cut]), batch_size=28, shuffle=True),
        val=DataLoader(TensorDataset(x[cut:], y[cut:]), batch_size=28),
    )
