import itertools

import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def mlp(sizes):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers)


class Task(forge.TaskModule):
    """Profit of a shop."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp([10, hidden, hidden, 1])

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        prediction = self(x)
        return {"loss": F.mse_loss(prediction, y), "mae": (prediction - y).abs().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(57)
    x = torch.randn(1500, 10, generator=g)
    y = x[:, 0] + 0.8 * x[:, 1] * x[:, 2] - 0.6 * x[:, 3] + 0.2 * torch.randn(1500, generator=g)
    y = (y - y.mean()) / y.std()
    train = TensorDataset(x[:1200], y[:1200])
    val = TensorDataset(x[1200:], y[1200:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
