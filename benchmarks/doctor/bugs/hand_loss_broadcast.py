import math

import forge
import torch
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def log_cosh(prediction, target):
    error = (prediction - target).abs()
    return (error + torch.log1p(torch.exp(-2 * error)) - math.log(2)).mean()


class Forecaster(nn.Module):
    def __init__(self, channels: int = 3, hidden: int = 32):
        super().__init__()
        self.rnn = nn.GRU(channels, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, window):
        states, _ = self.rnn(window)
        return self.out(states[:, -1])


class Task(forge.TaskModule):
    """Forecast the next value of the first channel from a window of three."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.model = Forecaster()

    def forward(self, window):
        return self.model(window)

    def training_step(self, batch):
        window, following = batch
        return {"loss": log_cosh(self(window), following)}

    def validation_step(self, batch):
        window, following = batch
        return {"loss": log_cosh(self(window), following)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data(batch_size: int = 32, window: int = 24) -> Splits:
    g = torch.Generator().manual_seed(2)
    t = torch.arange(1000 + window).float()
    first = torch.sin(t / 6) + 0.6 * torch.sin(t / 2.3 + 1)
    second = torch.cos(t / 6 + 0.5)
    third = torch.sin(t / 2.3)
    series = torch.stack([first, second, third], dim=1) + 0.1 * torch.randn(len(t), 3, generator=g)
    series = (series - series[:800].mean(0)) / series[:800].std(0)
    windows = series.unfold(0, window, 1).transpose(1, 2)[:1000]
    following = series[window:, 0]
    train = TensorDataset(windows[:800], following[:800])
    val = TensorDataset(windows[840:], following[840:])
    return Splits(
        train=DataLoader(train, batch_size=batch_size, shuffle=True),
        val=DataLoader(val, batch_size=80),
    )
