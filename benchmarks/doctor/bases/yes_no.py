import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """Whether a customer leaves, from ten numbers."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(10, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        logit = self(x)
        loss = F.binary_cross_entropy_with_logits(logit, y)
        return {"loss": loss, "accuracy": ((logit > 0) == y.bool()).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(39)
    x = torch.randn(1600, 10, generator=g)
    score = x[:, 0] * x[:, 1] + x[:, 2] - 0.6 * x[:, 3] + 0.3 * torch.randn(1600, generator=g)
    y = (score > score.median()).float()
    return Splits(
        train=TensorLoader(x[:1280], y[:1280], batch_size=32, shuffle=True),
        val=TensorLoader(x[1280:], y[1280:], batch_size=64),
    )
