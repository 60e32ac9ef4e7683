import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


class Task(forge.TaskModule):
    """Load of a ship from eight pressure readings."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3, warmup: int = 2000):
        super().__init__()
        self.lr = lr
        self.warmup = warmup
        self.net = nn.Sequential(
            nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return optimizer, LambdaLR(optimizer, lambda step: min(1, step // self.warmup))


def data() -> Splits:
    g = torch.Generator().manual_seed(87)
    x = torch.randn(1500, 8, generator=g)
    y = x.mean(1) * 2 + torch.tanh(x[:, 0] * x[:, 1]) + 0.2 * torch.randn(1500, generator=g)
    y = (y - y.mean()) / y.std()
    return Splits(
        train=TensorLoader(x[:1200], y[:1200], batch_size=32, shuffle=True),
        val=TensorLoader(x[1200:], y[1200:], batch_size=32),
    )
