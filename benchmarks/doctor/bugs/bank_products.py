import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Which of six products a customer buys."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(15, hidden),
            nn.LayerNorm(hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, 6),
            nn.Dropout(0.5),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(76)
    x = torch.randn(1400, 15, generator=g)
    y = (torch.tanh(x) @ torch.randn(15, 6, generator=g) + 0.4 * torch.randn(1400, 6, generator=g)).argmax(1)
    train = TensorDataset(x[:1120], y[:1120])
    val = TensorDataset(x[1120:], y[1120:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
