import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Flow through a valve."""

    def __init__(self, hidden: int = 64, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(7, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        schedule = ReduceLROnPlateau(optimizer, mode="max", factor=0.1, patience=1)
        return optimizer, schedule, "val/loss"


def data() -> Splits:
    g = torch.Generator().manual_seed(26)
    x = torch.randn(1400, 7, generator=g)
    y = torch.sin(2 * x[:, 0]) * x[:, 1] + x[:, 2] * x[:, 3] + 0.5 * x[:, 4] + 0.15 * torch.randn(1400, generator=g)
    y = (y - y.mean()) / y.std()
    train = TensorDataset(x[:1120], y[:1120])
    val = TensorDataset(x[1120:], y[1120:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
