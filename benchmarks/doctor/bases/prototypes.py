import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Embedder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, x):
        h = self.net(x)
        return F.normalize(h, dim=1)


class Task(forge.TaskModule):
    """Which of eight persons it is, by the cosine to their prototype."""

    def __init__(self, width: int = 24, scale: float = 8.0, lr: float = 2e-3):
        super().__init__()
        self.lr, self.scale = lr, scale
        self.embed = Embedder(width)
        self.prototypes = nn.Parameter(torch.randn(8, width))

    def forward(self, x):
        return self.scale * self.embed(x) @ F.normalize(self.prototypes, dim=1).T

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(34)
    y = torch.randint(8, (1400,), generator=g)
    light = 0.5 + torch.rand(1400, 1, generator=g)
    x = torch.randn(8, 24, generator=g)[y] * light + 1.2 * torch.randn(1400, 24, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    return Splits(
        train=TensorLoader(x[:1120], y[:1120], batch_size=32, shuffle=True),
        val=TensorLoader(x[1120:], y[1120:], batch_size=56),
    )
