import forge
import torch
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def huber(prediction, target, delta: float = 1.0):
    error = prediction - target
    small = error.abs() <= delta
    return torch.where(small, 0.5 * error**2, delta * (error.abs() - 0.5 * delta)).mean()


class Task(forge.TaskModule):
    """Energy use of a building from weather and time."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(7, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        return {"loss": huber(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(62)
    weather = torch.randn(1500, 5, generator=g)
    hour = 6.28 * torch.rand(1500, generator=g)
    x = torch.cat([weather, hour.sin().unsqueeze(1), hour.cos().unsqueeze(1)], 1)
    y = weather[:, 0].abs() + 0.8 * hour.sin() * weather[:, 1] - 0.4 * weather[:, 2]
    y = y + 0.2 * torch.randn(1500, generator=g)
    y = (y - y.mean()) / y.std()
    dataset = TensorDataset(x, y)
    train, val = random_split(dataset, [1200, len(dataset) - 1200], generator=torch.Generator().manual_seed(13))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
