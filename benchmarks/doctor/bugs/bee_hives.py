import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Whether a hive is healthy, from its sound."""

    def __init__(self, hidden: int = 48, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Sigmoid()
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, healthy = batch
        p = self(x)
        predicted = p > 0
        loss = F.binary_cross_entropy(p, healthy)
        return {"loss": loss, "accuracy": (predicted == healthy.bool()).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(39)
    x = torch.randn(1300, 16, generator=g)
    score = x[:, 0] + x[:, 1] * x[:, 2] - x[:, 3] + 0.4 * torch.randn(1300, generator=g)
    healthy = (score > 0).float()
    return Splits(
        train=TensorLoader(x[:1040], healthy[:1040], batch_size=32, shuffle=True),
        val=TensorLoader(x[1040:], healthy[1040:], batch_size=32),
    )
