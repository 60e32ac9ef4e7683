import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Task(forge.TaskModule):
    """Price and days on the market, predicted together from eight features."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3, weight: float = 0.5):
        super().__init__()
        self.lr = lr
        self.weight = weight
        self.trunk = nn.Sequential(nn.Linear(8, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.price = nn.Linear(hidden, 1)
        self.days = nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.price(h).squeeze(1), self.days(h).squeeze(1)

    def training_step(self, batch):
        x, price, days = batch
        price_hat, days_hat = self(x)
        price_loss = F.mse_loss(price_hat, price)
        days_loss = F.mse_loss(days_hat, days)
        total = price_loss + self.weight * days_loss.item()
        return {"loss": total, "price_mse": price_loss, "days_mse": days_loss}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(8)
    x = torch.randn(1500, 8, generator=g)
    price = x[:, 0] + 0.7 * x[:, 1] * x[:, 2] - 0.5 * x[:, 3].abs() + 0.2 * torch.randn(1500, generator=g)
    days = torch.sin(2 * x[:, 4]) - 0.6 * x[:, 0] + 0.3 * x[:, 5] ** 2 + 0.2 * torch.randn(1500, generator=g)
    price, days = ((v - v.mean()) / v.std() for v in (price, days))
    dataset = TensorDataset(x, price, days)
    train, val = random_split(dataset, [1200, len(dataset) - 1200], generator=torch.Generator().manual_seed(35))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
