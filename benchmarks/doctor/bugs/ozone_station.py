import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Ozone of tomorrow from the measurements of today."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(12, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Dropout(0.4),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(0.4),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def step(self, batch):
        x, y = batch
        prediction = self(x)
        return {"loss": F.mse_loss(prediction, y), "mae": (prediction - y).abs().mean()}

    def training_step(self, batch):
        self.train()
        return self.step(batch)

    def validation_step(self, batch):
        self.train()
        return self.step(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(15)
    x = torch.randn(1400, 12, generator=g)
    y = torch.tanh(x[:, 0] + x[:, 1] * x[:, 2]) + 0.4 * x[:, 3] + 0.15 * torch.randn(1400, generator=g)
    y = (y - y.mean()) / y.std()
    return Splits(
        train=TensorLoader(x[:1120], y[:1120], batch_size=32, shuffle=True),
        val=TensorLoader(x[1120:], y[1120:], batch_size=32),
    )
