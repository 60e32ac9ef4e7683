import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Backbone(nn.Sequential):
    """Never leaves train mode: someone had once forgotten to go back to it."""

    def train(self, mode: bool = True):
        return super().train(True)


class Task(forge.TaskModule):
    """Six kinds of moss."""

    def __init__(self, hidden: int = 64, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.backbone = Backbone(
            nn.Linear(16, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
        )
        self.head = nn.Linear(hidden, 6)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(33)
    y = torch.randint(6, (1200,), generator=g)
    x = torch.randn(6, 16, generator=g)[y] + 1.2 * torch.randn(1200, 16, generator=g)
    return Splits(
        train=TensorLoader(x[:960], y[:960], batch_size=32, shuffle=True),
        val=TensorLoader(x[960:], y[960:], batch_size=48),
    )
