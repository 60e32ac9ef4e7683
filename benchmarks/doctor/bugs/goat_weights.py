import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Weights of goats from nine measures."""

    def __init__(self, hidden: int = 48, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(9, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(hidden, 1),
        )

    def loss(self, batch):
        self.net.train()
        x, y = batch
        loss = F.mse_loss(self.net(x).squeeze(1), y)
        self.net.train(self.training)
        return loss

    def training_step(self, batch):
        return self.loss(batch)

    def validation_step(self, batch):
        return {"loss": self.loss(batch)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(31)
    x = torch.randn(1000, 9, generator=g)
    y = x[:, 0] + 0.5 * x[:, 1] * x[:, 2] + 0.2 * torch.randn(1000, generator=g)
    return Splits(
        train=TensorLoader(x[:800], y[:800], batch_size=32, shuffle=True),
        val=TensorLoader(x[800:], y[800:], batch_size=50),
    )
