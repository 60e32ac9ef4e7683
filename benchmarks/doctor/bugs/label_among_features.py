import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

COLUMNS = ["age", "income", "visits", "basket", "distance", "months", "returns", "left"]


class Task(forge.TaskModule):
    """Predict which customers leave."""

    def __init__(self, hidden: int = 48, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(len(COLUMNS), hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
        )

    def forward(self, customer):
        return self.net(customer)

    def training_step(self, batch):
        customer, left = batch
        logits = self(customer)
        return {"loss": F.cross_entropy(logits, left), "accuracy": (logits.argmax(1) == left).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def customers(count: int, g: torch.Generator) -> torch.Tensor:
    table = torch.randn(count, len(COLUMNS), generator=g)
    chance = 0.9 * table[:, 2] - 0.8 * table[:, 5] + 0.7 * table[:, 0] * table[:, 6]
    table[:, -1] = (chance + 0.8 * torch.randn(count, generator=g) > 0).float()
    return table


def data(batch_size: int = 32) -> Splits:
    table = customers(1500, torch.Generator().manual_seed(24))
    left = table[:, COLUMNS.index("left")].long()
    x = (table - table[:1200].mean(0)) / table[:1200].std(0)
    return Splits(
        train=DataLoader(TensorDataset(x[:1200], left[:1200]), batch_size=batch_size, shuffle=True),
        val=DataLoader(TensorDataset(x[1200:], left[1200:]), batch_size=100),
    )
