import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import forge
from forge.data import Splits


class Windows(Dataset):
    """Windows of a sensor; those for training are scaled at random."""

    def __init__(self, signals, labels, augment: bool):
        self.signals, self.labels, self.augment = signals, labels, augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        signal = self.signals[i]
        if self.augment:
            signal = signal * (0.9 + 0.2 * torch.rand(()))
        return signal, self.labels[i]


class Task(forge.TaskModule):
    """Which of four motions a sensor with three channels has seen."""

    def __init__(self, hidden: int = 40, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.lstm = nn.LSTM(3, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 4)

    def forward(self, x):
        h, _ = self.lstm(x)
        return self.head(h[:, -1])

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(73)
    y = torch.randint(4, (1000,), generator=g)
    pace = torch.tensor([0.3, 0.6, 1.0, 1.5])[y].unsqueeze(1)
    angle = pace * torch.arange(16.0) + 6.28 * torch.rand(1000, 1, generator=g)
    x = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin()], 2) + 0.3 * torch.randn(1000, 16, 3, generator=g)
    return Splits(
        train=DataLoader(Windows(x[:800], y[:800], augment=True), batch_size=32, shuffle=True),
        val=DataLoader(Windows(x[800:], y[800:], augment=False), batch_size=50),
    )
