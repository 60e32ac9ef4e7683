import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Fraud, which is about one payment in twenty."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        logit = self(x)
        loss = F.binary_cross_entropy_with_logits(logit, y)
        return {"loss": loss, "accuracy": ((logit > 0).float() == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(15)
    x = torch.randn(1000, 16, generator=g)
    score = x[:, 0] * x[:, 1] + x[:, 2] + 1.2 * torch.randn(1000, generator=g)
    y = (score > torch.quantile(score, 0.95)).float()
    rare = (y == 1).nonzero().squeeze(1)
    again = rare[torch.randint(len(rare), (int((y == 0).sum()) - len(rare),), generator=g)]
    rows = torch.cat([torch.arange(1000), again])
    rows = rows[torch.randperm(len(rows), generator=g)]
    x, y = x[rows], y[rows]
    cut = int(0.8 * len(rows))
    return Splits(
        train=TensorLoader(x[:cut], y[:cut], batch_size=32, shuffle=True),
        val=TensorLoader(x[cut:], y[cut:], batch_size=64),
    )
