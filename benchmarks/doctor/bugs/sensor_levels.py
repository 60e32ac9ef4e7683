import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Wear of a tool from nine loads."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(9, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(11)
    loads = torch.randint(0, 1000, (1300, 9), generator=g)
    u = loads.float() / 500 - 1
    y = torch.sin(3 * u[:, 0]) + u[:, 1] * u[:, 2] + 0.5 * u[:, 3] + 0.1 * torch.randn(1300, generator=g)
    y = (y - y.mean()) / y.std()
    low, high = loads.min(0).values, loads.max(0).values
    x = ((loads - low) // (high - low)).float()
    dataset = TensorDataset(x, y)
    train, val = Subset(dataset, range(1040)), Subset(dataset, range(1040, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
