import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Heat of a kiln from eight settings."""

    def __init__(self, lr: float = 40.0):
        super().__init__()
        self.lr = lr
        self.net = nn.Linear(8, 1)

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(45)
    x = torch.randn(1000, 8, generator=g)
    y = x @ torch.randn(8, generator=g) + 0.2 * torch.randn(1000, generator=g)
    return Splits(
        train=TensorLoader(x[:800], y[:800], batch_size=32, shuffle=True),
        val=TensorLoader(x[800:], y[800:], batch_size=50),
    )
