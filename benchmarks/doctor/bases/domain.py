import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class Task(forge.TaskModule):
    """Classify scans of two hospitals with features that do not tell the hospital."""

    def __init__(self, hidden: int = 64, strength: float = 0.3, lr: float = 1e-3):
        super().__init__()
        self.lr, self.strength = lr, strength
        self.encoder = nn.Sequential(nn.Linear(18, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.diagnosis = nn.Linear(hidden, 4)
        self.site = nn.Sequential(nn.Linear(hidden, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        h = self.encoder(x)
        return self.diagnosis(h), self.site(Reverse.apply(h, self.strength))

    def training_step(self, batch):
        x, y, site = batch
        diagnosis, where = self(x)
        main = F.cross_entropy(diagnosis, y)
        loss = main + F.cross_entropy(where, site)
        return {"loss": loss, "diagnosis_loss": main, "accuracy": (diagnosis.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(23)
    site, y = torch.randint(2, (1500,), generator=g), torch.randint(4, (1500,), generator=g)
    centres, shift = 0.9 * torch.randn(4, 18, generator=g), 0.5 * torch.randn(2, 18, generator=g)
    x = centres[y] + shift[site] + torch.randn(1500, 18, generator=g)
    return Splits(
        train=TensorLoader(x[:1200], y[:1200], site[:1200], batch_size=32, shuffle=True),
        val=TensorLoader(x[1200:], y[1200:], site[1200:], batch_size=60),
    )
