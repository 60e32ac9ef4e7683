import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Kind of glass."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3, gamma: float = 0.7):
        super().__init__()
        self.lr = lr
        self.gamma = gamma
        self.net = nn.Sequential(
            nn.Linear(9, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 6)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return optimizer, ExponentialLR(optimizer, gamma=self.gamma)


def data() -> Splits:
    g = torch.Generator().manual_seed(14)
    y = torch.randint(6, (1200,), generator=g)
    centres = torch.randn(6, 3, 9, generator=g)
    x = centres[y, torch.randint(3, (1200,), generator=g)] + 0.6 * torch.randn(1200, 9, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    train = TensorDataset(x[:960], y[:960])
    val = TensorDataset(x[960:], y[960:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
