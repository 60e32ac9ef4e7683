import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """Any number of six tags for a piece of music."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(24, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 6)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, tags = batch
        logits = self(x)
        loss = F.binary_cross_entropy_with_logits(logits, tags)
        return {"loss": loss, "accuracy": ((logits > 0) == tags.bool()).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(29)
    tags = (torch.rand(1500, 6, generator=g) < 0.35).float()
    x = tags @ torch.randn(6, 24, generator=g) + 1.2 * torch.randn(1500, 24, generator=g)
    x = (x - x[:1200].mean(0)) / x[:1200].std(0)
    return Splits(
        train=TensorLoader(x[:1200], tags[:1200], batch_size=32, shuffle=True),
        val=TensorLoader(x[1200:], tags[1200:], batch_size=60),
    )
