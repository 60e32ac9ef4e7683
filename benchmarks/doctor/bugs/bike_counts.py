import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Net(nn.Module):
    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(features, hidden), nn.Linear(hidden, hidden)])
        self.out = nn.Linear(hidden, 1)
        for p in self.parameters():
            nn.init.constant_(p, 0.05)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x).squeeze(1)


class Task(forge.TaskModule):
    """How many bikes are rented."""

    def __init__(self, hidden: int = 48, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = Net(8, hidden)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(67)
    x = torch.randn(1500, 8, generator=g)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] - 0.5 * x[:, 3] + 0.2 * torch.randn(1500, generator=g)
    y = (y - y.mean()) / y.std()
    return Splits(
        train=TensorLoader(x[:1200], y[:1200], batch_size=32, shuffle=True),
        val=TensorLoader(x[1200:], y[1200:], batch_size=32),
    )
