from types import SimpleNamespace

import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Classify points by which arm of a spiral they lie on, with some columns of noise."""

    def __init__(self, hidden: int = 64, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.parts = SimpleNamespace(
            lift=nn.Linear(6, hidden),
            middle=nn.Linear(hidden, hidden),
            norm=nn.LayerNorm(hidden),
        )
        self.head = nn.Linear(hidden, 3)

    def forward(self, x):
        h = F.relu(self.parts.lift(x))
        h = F.relu(self.parts.norm(self.parts.middle(h)))
        return self.head(h)

    def training_step(self, batch):
        x, arm = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, arm), "accuracy": (logits.argmax(1) == arm).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(23)
    arm = torch.randint(3, (1200,), generator=g)
    radius = torch.rand(1200, generator=g).sqrt()
    angle = 2 * torch.pi * arm / 3 + 3 * radius + 0.15 * torch.randn(1200, generator=g)
    plane = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1) / 0.5
    x = torch.cat([plane, torch.randn(1200, 4, generator=g)], dim=1)
    return Splits(
        train=DataLoader(TensorDataset(x[:960], arm[:960]), batch_size=batch_size, shuffle=True),
        val=DataLoader(TensorDataset(x[960:], arm[960:]), batch_size=80),
    )
