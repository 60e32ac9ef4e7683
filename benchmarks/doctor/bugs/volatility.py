import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Return and spread of an asset over the next day."""

    def __init__(self, hidden: int = 48, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.centre = nn.Linear(hidden, 1)
        self.spread = nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.body(x)
        sigma = F.softplus(self.spread(h)).clamp(min=2.0).squeeze(1)
        return self.centre(h).squeeze(1), sigma

    def training_step(self, batch):
        x, y = batch
        mean, sigma = self(x)
        loss = -torch.distributions.Normal(mean, sigma).log_prob(y).mean()
        return {"loss": loss, "sigma": sigma.mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(14)
    x = torch.randn(1500, 10, generator=g)
    spread = 0.1 + 0.5 * torch.sigmoid(2 * x[:, 3])
    y = 0.6 * x[:, 0] + 0.5 * torch.sin(2 * x[:, 1]) + spread * torch.randn(1500, generator=g)
    y = y / y.std()
    dataset = TensorDataset(x, y)
    train, val = Subset(dataset, range(1200)), Subset(dataset, range(1200, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
