import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Regress the strength of concrete on its mixture."""

    def __init__(self, hidden: int = 64, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(7, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1)
        )

    def forward(self, mixture):
        return self.net(mixture)

    def training_step(self, batch):
        mixture, strength = batch
        return {"loss": F.mse_loss(self(mixture), strength)}

    def validation_step(self, batch):
        mixture, strength = batch
        predicted = self(mixture)
        return {"loss": F.mse_loss(predicted, strength), "mae": F.l1_loss(predicted, strength)}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return optimizer, StepLR(optimizer, step_size=4, gamma=0.3)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(90)
    mixture = torch.randn(1200, 7, generator=g)
    a, b, c, d = mixture[:, :4].unbind(1)
    strength = a * torch.sigmoid(2 * b) - c.abs() + 0.7 * torch.sin(2 * d)
    strength = (strength + 0.15 * torch.randn(1200, generator=g)).unsqueeze(1)
    strength = (strength - strength[:960].mean()) / strength[:960].std()
    train = TensorDataset(mixture[:960], strength[:960])
    val = TensorDataset(mixture[960:], strength[960:])
    return Splits(
        train=DataLoader(train, batch_size=batch_size, shuffle=True),
        val=DataLoader(val, batch_size=80),
    )
