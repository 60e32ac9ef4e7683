import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Whether a loan is repaid, from age, income, rate, debt and years of work."""

    def __init__(self, hidden: int = 48, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(43)
    z = torch.randn(1400, 5, generator=g)
    age = 42 + 11 * z[:, 0]
    income = torch.exp(10.8 + 0.5 * z[:, 1])
    rate = 0.05 + 0.015 * z[:, 2]
    debt = torch.exp(9.5 + 0.8 * z[:, 3])
    years = torch.relu(9 + 5 * z[:, 4])
    score = 0.8 * z[:, 1] - z[:, 2] - 0.7 * z[:, 3] + 0.6 * z[:, 0] * z[:, 4] + 0.3 * torch.randn(1400, generator=g)
    y = (score > 0).long()
    x = torch.stack([age, income, rate, debt, years], 1)
    dataset = TensorDataset(x, y)
    train, val = Subset(dataset, range(1120)), Subset(dataset, range(1120, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
