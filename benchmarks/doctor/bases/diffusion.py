import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """Predict the noise in points of two moons at a random step; validation draws from a fixed generator."""

    def __init__(self, steps: int = 100, lr: float = 2e-3):
        super().__init__()
        self.steps, self.lr = steps, lr
        self.net = nn.Sequential(nn.Linear(18, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.1, steps), 0))

    def forward(self, points, time):
        angles = time[:, None] * torch.logspace(0, 3, 8)
        return self.net(torch.cat([points, angles.sin(), angles.cos()], 1))

    def loss(self, points, g=None):
        step = torch.randint(self.steps, (len(points),), generator=g)
        noise = torch.randn(points.shape, generator=g)
        kept = self.kept[step][:, None]
        return F.mse_loss(self(kept.sqrt() * points + (1 - kept).sqrt() * noise, step / self.steps), noise)

    def training_step(self, batch):
        return self.loss(*batch)

    def validation_step(self, batch):
        return self.loss(*batch, torch.Generator().manual_seed(7))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(2)
    angle, upper = 3.1416 * torch.rand(512, generator=g), torch.rand(512, generator=g) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x, y], 1) + 0.05 * torch.randn(512, 2, generator=g)
    points = (points - points.mean(0)) / points.std(0)
    return Splits(
        train=TensorLoader(points[:448], batch_size=32, shuffle=True), val=TensorLoader(points[448:], batch_size=32)
    )
