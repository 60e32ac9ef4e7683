import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Rent of a flat."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.district = nn.Embedding(12, 8)
        self.net = nn.Sequential(nn.Linear(6 + 8, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, 1)

    def forward(self, x, district):
        return self.out(self.net(torch.cat([x, self.district(district)], 1))).squeeze(1)

    def training_step(self, batch):
        x, district, rent = batch
        prediction = self(x, district)
        return {"loss": F.mse_loss(prediction, rent), "mae": (prediction - rent).abs().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def standardize(train, *others):
    mean, std = train.mean(0), train.std(0)
    return [(part - mean) / std for part in (train, *others)]


def data() -> Splits:
    g = torch.Generator().manual_seed(82)
    x = torch.randn(1300, 6, generator=g) * torch.tensor([20.0, 1.0, 5.0, 2.0, 10.0, 1.0]) + 30
    district = torch.randint(12, (1300,), generator=g)
    base = 3 * torch.randn(12, generator=g)
    z = (x - 30) / torch.tensor([20.0, 1.0, 5.0, 2.0, 10.0, 1.0])
    rent = 14 + 4 * z[:, 0] + 2 * z[:, 1] * z[:, 2] + base[district] + torch.randn(1300, generator=g)
    x_train, x_val = standardize(x[:1040], x[1040:])
    rent_train, rent_val = standardize(rent[:1040])[0], rent[1040:]
    return Splits(
        train=TensorLoader(x_train, district[:1040], rent_train, batch_size=32, shuffle=True),
        val=TensorLoader(x_val, district[1040:], rent_val, batch_size=65),
    )
