import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    """Windows of a series with the value that follows each of them."""

    def __init__(self, series: torch.Tensor, first: int, count: int, length: int = 20):
        self.series = series
        self.first = first
        self.count = count
        self.length = length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        start = self.first
        stop = start + self.length
        return self.series[start:stop], self.series[stop]


class Task(forge.TaskModule):
    """Forecast the next value of a series."""

    def __init__(self, length: int = 20, hidden: int = 48, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(length, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, window):
        return self.net(window).squeeze(-1)

    def training_step(self, batch):
        window, following = batch
        return {"loss": F.mse_loss(self(window), following)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(1)
    time = torch.arange(1100.0)
    series = torch.sin(time / 5) * torch.cos(time / 37) + 0.5 * torch.sin(time / 1.7)
    series = series + 0.1 * torch.randn(1100, generator=g)
    series = (series - series[:820].mean()) / series[:820].std()
    return Splits(
        train=DataLoader(Windows(series, 0, 800), batch_size=batch_size, shuffle=True),
        val=DataLoader(Windows(series, 840, 200), batch_size=50),
    )
