import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    """Windows of a series and the value that follows."""

    def __init__(self, series, window: int = 24):
        self.series = series
        self.window = window

    def __len__(self):
        return len(self.series) - self.window

    def __getitem__(self, i):
        return self.series[i : i + self.window], self.series[i + self.window - 1]


class Task(forge.TaskModule):
    def __init__(self, hidden: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.rnn(x.unsqueeze(-1))
        return self.out(h[:, -1]).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(72)
    t = torch.arange(1200.0)
    tide = torch.sin(0.5 * t) + 0.6 * torch.sin(0.483 * t + 1.0) + 0.7 * torch.randn(1200, generator=g)
    tide = (tide - tide[:960].mean()) / tide[:960].std()
    return Splits(
        train=DataLoader(Windows(tide[:960]), batch_size=32, shuffle=True),
        val=DataLoader(Windows(tide[960:]), batch_size=64),
    )
