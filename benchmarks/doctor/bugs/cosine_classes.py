import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Class by the direction of a feature vector."""

    def __init__(self, width: int = 48, scale: float = 8.0, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.scale = scale
        self.net = nn.Sequential(nn.Linear(15, 96), nn.ReLU(), nn.Linear(96, width))
        self.prototypes = nn.Parameter(torch.randn(6, width) / width**0.5)

    def features(self, x):
        h = self.net(x)
        h.data.div_(h.data.norm(dim=1, keepdim=True) + 1e-6)
        return h

    def forward(self, x):
        return self.scale * self.features(x) @ F.normalize(self.prototypes, dim=1).T

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(44)
    x = torch.randn(1500, 15, generator=g)
    teacher = torch.randn(15, 24, generator=g) / 3.9
    out = torch.randn(24, 6, generator=g)
    y = (torch.relu(x @ teacher) @ out + 0.3 * torch.randn(1500, 6, generator=g)).argmax(1)
    return Splits(
        train=TensorLoader(x[:1200], y[:1200], batch_size=32, shuffle=True),
        val=TensorLoader(x[1200:], y[1200:], batch_size=32),
    )
