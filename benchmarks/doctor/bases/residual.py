import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mix(self.norm(x))


class Task(forge.TaskModule):
    """A number from nine measures, by a deep network."""

    def __init__(self, width: int = 40, depth: int = 4, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.inp = nn.Linear(9, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = block(h)
        return self.out(h).squeeze(-1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(8)
    x = torch.randn(1600, 9, generator=g)
    y = torch.sin(2 * x[:, 0]) * x[:, 1] + x[:, 2] * x[:, 3] + 0.5 * x[:, 4] + 0.2 * torch.randn(1600, generator=g)
    y = (y - y.mean()) / y.std()
    return Splits(
        train=TensorLoader(x[:1280], y[:1280], batch_size=32, shuffle=True),
        val=TensorLoader(x[1280:], y[1280:], batch_size=64),
    )
