import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Edge of a leaf: smooth, toothed or lobed, from its outline."""

    def __init__(self, hidden: int = 64, lr: float = 3.0):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(36, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 3)
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
    g = torch.Generator().manual_seed(62)
    y = torch.randint(3, (1200,), generator=g)
    angle = torch.linspace(0, 6.28, 36)
    turn = 6.28 * torch.rand(1200, 1, generator=g)
    teeth = torch.tensor([0.0, 11.0, 4.0])[y].unsqueeze(1)
    x = torch.cos(teeth * angle + turn) + torch.cos(angle + turn) + 0.4 * torch.randn(1200, 36, generator=g)
    x = x - x.mean(1, keepdim=True)
    return Splits(
        train=TensorLoader(x[:960], y[:960], batch_size=32, shuffle=True),
        val=TensorLoader(x[960:], y[960:], batch_size=32),
    )
