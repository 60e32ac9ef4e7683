import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Estimate the price of a house in euros."""

    def __init__(self, features: int = 8, hidden: int = 64, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, house):
        return self.net(house).squeeze(-1)

    def training_step(self, batch):
        house, price = batch
        estimate = self(house)
        return {"loss": F.mse_loss(estimate, price), "mae": (estimate - price).abs().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(40)
    house = torch.randn(1000, 8, generator=g)
    value = 1.2 * house[:, 0] + 0.6 * house[:, 1] * house[:, 2] + 0.5 * torch.tanh(2 * house[:, 3])
    price = 250_000 + 80_000 * value + 10_000 * torch.randn(1000, generator=g)
    train = TensorDataset(house[:800], price[:800])
    val = TensorDataset(house[800:], price[800:])
    return Splits(
        train=DataLoader(train, batch_size=batch_size, shuffle=True),
        val=DataLoader(val, batch_size=100),
    )
