import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Tomorrow's volume of trade."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.smooth_l1_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(80)
    volume = torch.exp(torch.randn(1400, 10, generator=g))
    level = volume.log()
    y = level[:, 0] + 0.7 * level[:, 1] * level[:, 2] - 0.5 * level[:, 3] + 0.2 * torch.randn(1400, generator=g)
    y = (y - y.mean()) / y.std()
    x = (volume - volume.mean(0)) / volume.std(0)
    x = torch.nan_to_num(torch.log(x), nan=0.0)
    train = TensorDataset(x[:1120], y[:1120])
    val = TensorDataset(x[1120:], y[1120:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
