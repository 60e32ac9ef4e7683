import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Ripeness of fruit from a spectrum."""

    def __init__(self, hidden: int = 96, gain: float = 12.0, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(30, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4)
        )
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight, gain=gain)
                nn.init.zeros_(layer.bias)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(30)
    y = torch.randint(4, (1200,), generator=g)
    bands = torch.arange(30.0)
    peak = (8 + 4 * y).unsqueeze(1) + 2 * torch.randn(1200, 1, generator=g)
    x = 2 * torch.exp(-((bands - peak) ** 2) / 20) + 0.6 * torch.randn(1200, 30, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    train = TensorDataset(x[:960], y[:960])
    val = TensorDataset(x[960:], y[960:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
