import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Waves(nn.Module):
    """Sines of many frequencies, up to four thousand."""

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("rates", torch.logspace(0, 3.6, width).unsqueeze(0))

    def forward(self, t):
        return torch.sin(t @ self.rates)


class Task(forge.TaskModule):
    """Bands of a pulse from its time."""

    def __init__(self, width: int = 64, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(Waves(width), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, t):
        return self.net(t)

    def training_step(self, batch):
        t, band = batch
        return {"loss": F.cross_entropy(self(t), band)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(56)
    t = 2 * torch.rand(1000, 1, generator=g) - 1
    band = ((6 * t[:, 0]).floor().long() % 3).clamp(0, 2)
    return Splits(
        train=TensorLoader(t[:800], band[:800], batch_size=32, shuffle=True),
        val=TensorLoader(t[800:], band[800:], batch_size=50),
    )
