import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Grades of rice from twelve measures."""

    def __init__(self, hidden: int = 48, lr: float = 5e-2):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(42)
    y = torch.randint(4, (1000,), generator=g)
    x = torch.randn(4, 12, generator=g)[y] + 0.8 * torch.randn(1000, 12, generator=g)
    return Splits(
        train=TensorLoader(x[:800], y[:800], batch_size=32, shuffle=True),
        val=TensorLoader(x[800:], y[800:], batch_size=50),
    )
