import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Task(forge.TaskModule):
    """Two changed views of a sample must find each other in the batch; validation changes with fixed noise."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.encoder, self.projector = mlp(16, 64, 32), mlp(32, 32, 16)

    def forward(self, x):
        return self.projector(self.encoder(x))

    def view(self, x, g):
        noise = 0.3 * torch.randn(x.shape, generator=g)
        keep = (torch.rand(x.shape, generator=g) > 0.1).float()
        return (x * (0.8 + 0.4 * torch.rand(len(x), 1, generator=g)) + noise) * keep

    def compare(self, one, two):
        codes = F.normalize(self(torch.cat([one, two])), dim=1)
        likeness = (codes @ codes.T / 0.2).fill_diagonal_(-1e9)
        return F.cross_entropy(likeness, torch.arange(2 * len(one)).roll(len(one)))

    def training_step(self, batch):
        return self.compare(self.view(batch[0], None), self.view(batch[0], None))

    def validation_step(self, batch):
        g = torch.Generator().manual_seed(2)
        return {"loss": self.compare(self.view(batch[0], g), self.view(batch[0], g))}

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, weight_decay=1e-4)


def data() -> Splits:
    g = torch.Generator().manual_seed(1)
    y = torch.randint(8, (400,), generator=g)
    x = 1.5 * torch.randn(8, 16, generator=g)[y] + 0.9 * torch.randn(400, 16, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    return Splits(
        train=TensorLoader(x[:352], y[:352], batch_size=32, shuffle=True),
        val=TensorLoader(x[352:], y[352:], batch_size=48),
    )
