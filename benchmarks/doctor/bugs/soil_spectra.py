import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Moisture of soil from spectra."""

    def __init__(self, hidden: int = 64, momentum: float = 1e-4, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(25, hidden),
            nn.BatchNorm1d(hidden, momentum=momentum),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.BatchNorm1d(hidden, momentum=momentum),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(52)
    cause = torch.randn(1400, 4, generator=g)
    x = cause @ torch.randn(4, 25, generator=g) + 0.4 * torch.randn(1400, 25, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.sin(cause[:, 0]) + 0.5 * cause[:, 1] * cause[:, 2] + 0.15 * torch.randn(1400, generator=g)
    y = (y - y.mean()) / y.std()
    return Splits(
        train=TensorLoader(x[:1120], y[:1120], batch_size=32, shuffle=True),
        val=TensorLoader(x[1120:], y[1120:], batch_size=32),
    )
