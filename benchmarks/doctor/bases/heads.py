import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """The price of a house, and whether it is sold within a month, from eight features."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3, weight: float = 0.5):
        super().__init__()
        self.lr, self.weight = lr, weight
        self.trunk = nn.Sequential(nn.Linear(8, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.price = nn.Linear(hidden, 1)
        self.sold = nn.Linear(hidden, 2)

    def forward(self, x):
        h = self.trunk(x)
        return self.price(h).squeeze(1), self.sold(h)

    def losses(self, batch):
        x, price, sold = batch
        guess, logits = self(x)
        return F.mse_loss(guess, price), F.cross_entropy(logits, sold)

    def training_step(self, batch):
        price_loss, sold_loss = self.losses(batch)
        return {"loss": price_loss + self.weight * sold_loss, "price_loss": price_loss, "sold_loss": sold_loss}

    def validation_step(self, batch):
        price_loss, sold_loss = self.losses(batch)
        return {"loss": price_loss + self.weight * sold_loss, "price_loss": price_loss, "sold_loss": sold_loss}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(8)
    x = torch.randn(1500, 8, generator=g)
    price = x[:, 0] + 0.7 * x[:, 1] * x[:, 2] - 0.5 * x[:, 3].abs() + 0.2 * torch.randn(1500, generator=g)
    price = (price - price.mean()) / price.std()
    sold = (torch.sin(2 * x[:, 4]) - 0.6 * x[:, 0] + 0.2 * torch.randn(1500, generator=g) > 0).long()
    return Splits(
        train=TensorLoader(x[:1200], price[:1200], sold[:1200], batch_size=32, shuffle=True),
        val=TensorLoader(x[1200:], price[1200:], sold[1200:], batch_size=60),
    )
