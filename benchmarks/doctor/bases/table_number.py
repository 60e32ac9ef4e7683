import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader

FEATURES = 8


class Task(forge.TaskModule):
    """A number from eight measures."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(FEATURES, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    def validation_step(self, batch):
        x, y = batch
        guess = self(x)
        return {"loss": F.mse_loss(guess, y), "mae": (guess - y).abs().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(67)
    x = torch.randn(1500, FEATURES, generator=g)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] - 0.5 * x[:, 3] + 0.2 * torch.randn(1500, generator=g)
    y = (y - y.mean()) / y.std()
    return Splits(
        train=TensorLoader(x[:1200], y[:1200], batch_size=32, shuffle=True),
        val=TensorLoader(x[1200:], y[1200:], batch_size=30),
    )
