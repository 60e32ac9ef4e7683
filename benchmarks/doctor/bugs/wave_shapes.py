import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CarefulSGD(torch.optim.SGD):
    """SGD for groups of micro-batches."""

    def __init__(self, params, lr, momentum=0.0, group: int = 8):
        super().__init__(params, lr=lr, momentum=momentum)
        self.group = group
        self.calls = 0

    def zero_grad(self, set_to_none: bool = False):
        self.calls += 1
        if self.calls % self.group == 0:
            super().zero_grad(set_to_none=set_to_none)


class Task(forge.TaskModule):
    def __init__(self, hidden: int = 64, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(24, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 3)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return CarefulSGD(self.parameters(), lr=self.lr, momentum=0.5)


def data() -> Splits:
    """Sine, saw and square waves of random phase."""
    g = torch.Generator().manual_seed(66)
    y = torch.randint(3, (1200,), generator=g)
    t = torch.linspace(0, 12.56, 24)
    angle = t * (0.7 + 0.6 * torch.rand(1200, 1, generator=g)) + 6.28 * torch.rand(1200, 1, generator=g)
    kinds = torch.stack([torch.sin(angle), (angle / 3.14) % 2 - 1, torch.sign(torch.sin(angle))], 1)
    x = kinds[torch.arange(1200), y] + 0.3 * torch.randn(1200, 24, generator=g)
    train = TensorDataset(x[:960], y[:960])
    val = TensorDataset(x[960:], y[960:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
