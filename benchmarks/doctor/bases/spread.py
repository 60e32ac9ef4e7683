import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """Wind speed, with an uncertainty of its own for every sample."""

    def __init__(self, hidden: int = 64, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.mean, self.spread = nn.Linear(hidden, 1), nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h).squeeze(1), 6 * torch.tanh(self.spread(h).squeeze(1) / 6)

    def training_step(self, batch):
        x, y = batch
        mean, log_var = self(x)
        loss = 0.5 * (log_var + (y - mean).square() * torch.exp(-log_var)).mean()
        return {"loss": loss, "mse": F.mse_loss(mean, y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(45)
    x = torch.randn(1600, 6, generator=g)
    spread = 0.1 + 0.5 * torch.sigmoid(2 * x[:, 0])
    y = torch.sin(1.5 * x[:, 1]) + 0.5 * x[:, 2] * x[:, 3] + spread * torch.randn(1600, generator=g)
    y = (y - y.mean()) / y.std()
    return Splits(
        train=TensorLoader(x[:1280], y[:1280], batch_size=32, shuffle=True),
        val=TensorLoader(x[1280:], y[1280:], batch_size=64),
    )
