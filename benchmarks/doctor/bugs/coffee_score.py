import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Score of a cup of coffee on ten grades."""

    def __init__(self, hidden: int = 64, lr: float = 1e-3, eps: float = 1.0):
        super().__init__()
        self.lr = lr
        self.eps = eps
        self.net = nn.Sequential(
            nn.Linear(14, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 10)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "off_by": (logits.argmax(1) - y).abs().float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr, eps=self.eps)


def data() -> Splits:
    g = torch.Generator().manual_seed(48)
    x = torch.randn(1500, 14, generator=g)
    taste = x[:, 0] + 0.7 * x[:, 1] - 0.7 * x[:, 2] * x[:, 3] + 0.2 * torch.randn(1500, generator=g)
    y = torch.bucketize(taste, torch.quantile(taste, torch.linspace(0.1, 0.9, 9)))
    train = TensorDataset(x[:1200], y[:1200])
    val = TensorDataset(x[1200:], y[1200:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
