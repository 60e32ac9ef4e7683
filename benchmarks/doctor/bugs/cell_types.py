import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Type of a cell from thirteen measures."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(13, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 5)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(32)
    y = torch.randint(5, (1200,), generator=g)
    centres = torch.randn(5, 13, generator=g)
    size = 0.5 + 4 * torch.rand(13, generator=g)
    x = (centres[y] + torch.randn(1200, 13, generator=g)) * size + 5 * torch.randn(13, generator=g)
    x_train, x_val = x[:960], x[960:]
    x_train = (x_train - x_train.mean(0)) / x_train.std(0)
    x_val = (x_val - x_val.min(0).values) / (x_val.max(0).values - x_val.min(0).values)
    return Splits(
        train=TensorLoader(x_train, y[:960], batch_size=32, shuffle=True),
        val=TensorLoader(x_val, y[960:], batch_size=64),
    )
