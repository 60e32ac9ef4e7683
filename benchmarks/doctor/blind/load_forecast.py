"""Forecast the next hour of an electricity load series from windows of the past day."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, random_split

import forge


class Windows(Dataset):
    def __init__(self, series, window=24, horizon=4):
        self.series, self.window, self.horizon = series, window, horizon

    def __len__(self):
        return len(self.series) - self.window - self.horizon + 1

    def __getitem__(self, i):
        past = self.series[i : i + self.window]
        future = self.series[i + self.window : i + self.window + self.horizon]
        return past, future


class Task(forge.TaskModule):
    def __init__(self, lr=2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, past):
        return self.net(past)

    def training_step(self, batch):
        past, future = batch
        return {"loss": F.mse_loss(self(past), future)}

    def validation_step(self, batch):
        past, future = batch
        guess = self(past)
        return {"loss": F.mse_loss(guess, future), "mae": F.l1_loss(guess, future)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data():
    g = torch.Generator().manual_seed(9)
    hours = torch.arange(1000.0)
    day = torch.sin(hours * 2 * torch.pi / 24) + 0.4 * torch.sin(hours * 2 * torch.pi / 12)
    drift = torch.cumsum(0.05 * torch.randn(1000, generator=g), 0)
    series = day + drift + 0.2 * torch.randn(1000, generator=g)
    series = (series - series[:800].mean()) / series[:800].std()
    windows = Windows(series)
    cut = int(0.8 * len(windows))
    train, val = random_split(windows, [cut, len(windows) - cut], generator=g)
    return SimpleNamespace(
        train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32)
    )
