import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


def clusters(count: int, classes: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=g)
    x = 1.5 * torch.randn(classes, 12, generator=g)[y] + torch.randn(count, 12, generator=g)
    return (x - x.mean(0)) / x.std(0), y


def pretrained() -> nn.Sequential:
    """A stand-in for downloaded weights: a short training on a related task."""
    net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 6))
    x, y = clusters(256, 6, seed=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    net.zero_grad()
    return net


class Task(forge.TaskModule):
    """Tune a trained network for four new classes: its body learns at a tenth of the new head's rate."""

    def __init__(self):
        super().__init__()
        self.body, self.head = pretrained()[:4], nn.Linear(48, 4)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        groups = [{"params": self.body.parameters(), "lr": 1e-3}, {"params": self.head.parameters(), "lr": 1e-2}]
        optimizer = torch.optim.AdamW(groups)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)


def data() -> Splits:
    x, y = clusters(400, 4, seed=2)
    return Splits(
        train=TensorLoader(x[:352], y[:352], batch_size=16, shuffle=True),
        val=TensorLoader(x[352:], y[352:], batch_size=16),
    )
