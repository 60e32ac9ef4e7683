import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Thickness of paper from the settings of the machine."""

    def __init__(self, hidden: int = 48, lr: float = 0.02, momentum: float = 0.999):
        super().__init__()
        self.lr = lr
        self.momentum = momentum
        self.net = nn.Sequential(
            nn.Linear(11, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.smooth_l1_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def data() -> Splits:
    g = torch.Generator().manual_seed(26)
    x = torch.randn(1400, 11, generator=g)
    y = torch.sin(x[:, 0] + x[:, 1]) + 0.6 * x[:, 2] * x[:, 3] + 0.2 * torch.randn(1400, generator=g)
    y = (y - y.mean()) / y.std()
    train = TensorDataset(x[:1120], y[:1120])
    val = TensorDataset(x[1120:], y[1120:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
