import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Task(forge.TaskModule):
    """Level of a river four hours on, from the last two days."""

    def __init__(self, hidden: int = 64, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(48, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
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
    g = torch.Generator().manual_seed(43)
    rain = torch.relu(torch.randn(1300, generator=g) - 0.8)
    level = torch.zeros(1300)
    for t in range(1, 1300):
        level[t] = 0.96 * level[t - 1] + rain[t] + 0.02 * torch.randn((), generator=g)
    level = (level - level.mean()) / level.std()
    windows = level.unfold(0, 52, 1)
    x, y = windows[:, :48], windows[:, -1]
    train, val = random_split(TensorDataset(x, y), [0.8, 0.2], generator=g)
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=64))
