import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Any number of ten genres for a film."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(20, hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, genres = batch
        p = self(x).softmax(1)
        loss = F.binary_cross_entropy(p, genres)
        return {"loss": loss, "accuracy": ((p > 0.5).float() == genres).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(92)
    x = torch.randn(1400, 20, generator=g)
    mix = torch.randn(20, 10, generator=g) / 4.5
    genres = (torch.sin(1.5 * x) @ mix + 0.2 * torch.randn(1400, 10, generator=g) > -0.1).float()
    return Splits(
        train=TensorLoader(x[:1120], genres[:1120], batch_size=32, shuffle=True),
        val=TensorLoader(x[1120:], genres[1120:], batch_size=32),
    )
