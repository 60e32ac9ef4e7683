import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Fuel use of a car."""

    def __init__(self, hidden: int = 56, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.maker = nn.Embedding(9, 6)
        self.net = nn.Sequential(nn.Linear(7 + 6, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, 1)

    def forward(self, x, maker):
        return self.out(self.net(torch.cat([x, self.maker(maker)], 1))).squeeze(1)

    def training_step(self, batch):
        x, maker, y = batch
        return {"loss": F.mse_loss(self(x, maker), y)}

    def validation_step(self, batch):
        x, maker, y = batch
        prediction = self(x, maker)
        residual = (y - prediction).square().sum()
        total = (y - y.mean()).square().sum()
        return {"loss": F.mse_loss(prediction, y), "r2": 1 - total / residual}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(77)
    x = torch.randn(1300, 7, generator=g)
    maker = torch.randint(9, (1300,), generator=g)
    base = 0.7 * torch.randn(9, generator=g)
    y = x[:, 0] + 0.5 * x[:, 1] ** 2 - 0.6 * x[:, 2] * x[:, 3] + base[maker] + 0.2 * torch.randn(1300, generator=g)
    y = (y - y.mean()) / y.std()
    dataset = TensorDataset(x, maker, y)
    train, val = Subset(dataset, range(1040)), Subset(dataset, range(1040, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
