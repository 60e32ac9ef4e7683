import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Classify cells into three kinds by their shape features."""

    def __init__(self, hidden: int = 48, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(10, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 3),
        )

    def forward(self, cell):
        return self.net(cell)

    def training_step(self, batch):
        cell, kind = batch
        logits = self(cell)
        return {"loss": F.cross_entropy(logits, kind), "accuracy": (logits.argmax(1) == kind).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 256) -> Splits:
    g = torch.Generator().manual_seed(48)
    kind = torch.randint(3, (630,), generator=g)
    centres = torch.randn(3, 10, generator=g)
    cell = centres[kind] + torch.randn(630, 10, generator=g)
    cell = (cell - cell[:510].mean(0)) / cell[:510].std(0)
    return Splits(
        train=DataLoader(TensorDataset(cell[:510], kind[:510]), batch_size=batch_size, shuffle=True, drop_last=True),
        val=DataLoader(TensorDataset(cell[510:], kind[510:]), batch_size=60),
    )
