import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import forge
from forge.data import Splits


class Windows(Dataset):
    """Windows of a series, and the value that follows each of them."""

    def __init__(self, series, length: int = 24):
        self.series, self.length = series, length

    def __len__(self):
        return len(self.series) - self.length

    def __getitem__(self, i):
        return self.series[i : i + self.length], self.series[i + self.length]


class Task(forge.TaskModule):
    """The next value of a tide."""

    def __init__(self, hidden: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.gru = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, past):
        h, _ = self.gru(past.unsqueeze(-1))
        return self.out(h[:, -1]).squeeze(1)

    def training_step(self, batch):
        past, following = batch
        return {"loss": F.mse_loss(self(past), following)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(72)
    t = torch.arange(1200.0)
    tide = torch.sin(0.5 * t) + 0.6 * torch.sin(0.183 * t + 1.0) + 0.3 * torch.randn(1200, generator=g)
    tide = (tide - tide[:940].mean()) / tide[:940].std()
    return Splits(
        train=DataLoader(Windows(tide[:940]), batch_size=32, shuffle=True),
        val=DataLoader(Windows(tide[960:]), batch_size=54),
    )
