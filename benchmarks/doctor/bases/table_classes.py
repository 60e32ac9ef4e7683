import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forge
from forge.data import Splits

FEATURES, CLASSES = 12, 4


class Task(forge.TaskModule):
    """Which of four kinds a sample is, from twelve measures."""

    def __init__(self, hidden: int = 48, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(FEATURES, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, CLASSES),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(41)
    y = torch.randint(CLASSES, (1000,), generator=g)
    x = torch.randn(CLASSES, FEATURES, generator=g)[y] + 0.8 * torch.randn(1000, FEATURES, generator=g)
    train, val = TensorDataset(x[:800], y[:800]), TensorDataset(x[800:], y[800:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=50))
