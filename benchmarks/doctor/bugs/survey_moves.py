import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Whether a household would move, from a survey."""

    def __init__(self, hidden: int = 48, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.region = nn.Embedding(8, 6)
        self.net = nn.Sequential(nn.Linear(9 + 6, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, 2)

    def forward(self, numbers, region):
        return self.out(self.net(torch.cat([numbers, self.region(region)], 1)))

    def training_step(self, batch):
        numbers, region, y = batch
        logits = self(numbers, region)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def table(rows: int = 1401):
    g = torch.Generator().manual_seed(29)
    numbers = torch.randn(rows, 9, generator=g)
    region = torch.randint(8, (rows,), generator=g)
    pull = torch.randn(8, generator=g)
    wish = numbers[:, 0] + numbers[:, 1] * numbers[:, 2] + pull[region] + 0.3 * torch.randn(rows, generator=g)
    return torch.cat([numbers, region.unsqueeze(1), (wish > 0).float().unsqueeze(1)], 1)


def data() -> Splits:
    rows = table()
    numbers, region = rows[1:, :9], rows[1:, 9].long()
    y = rows[:-1, 10].long()
    return Splits(
        train=TensorLoader(numbers[:1120], region[:1120], y[:1120], batch_size=32, shuffle=True),
        val=TensorLoader(numbers[1120:], region[1120:], y[1120:], batch_size=32),
    )
