import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Tower(nn.Module):
    def __init__(self, features: int, width: int = 32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


class Task(forge.TaskModule):
    """Find the description that belongs to a photo, and the reverse."""

    def __init__(self, temperature: float = 0.1, lr: float = 2e-3):
        super().__init__()
        self.lr, self.temperature = lr, temperature
        self.left, self.right = Tower(18), Tower(14)

    def forward(self, a, b):
        return self.left(a) @ self.right(b).T

    def training_step(self, batch):
        a, b = batch
        logits = self(a, b) / self.temperature
        labels = torch.arange(len(a), device=a.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        return {"loss": loss, "found": (logits.argmax(1) == torch.arange(len(a), device=a.device)).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(11)
    thing = torch.randn(1500, 6, generator=g)
    a = torch.tanh(thing @ torch.randn(6, 18, generator=g) / 2) + 0.2 * torch.randn(1500, 18, generator=g)
    b = torch.tanh(thing @ torch.randn(6, 14, generator=g) / 2) + 0.2 * torch.randn(1500, 14, generator=g)
    return Splits(
        train=TensorLoader(a[:1200], b[:1200], batch_size=48, shuffle=True),
        val=TensorLoader(a[1200:], b[1200:], batch_size=50),
    )
