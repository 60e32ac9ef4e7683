import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Five gestures from three axes of an accelerometer."""

    def __init__(self, hidden: int = 40, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.lstm = nn.LSTM(3, hidden)
        self.out = nn.Linear(hidden, 5)

    def forward(self, x):
        batch, steps, axes = x.shape
        _, (h, _) = self.lstm(x.view(steps, batch, axes))
        return self.out(h[-1])

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(25)
    y = torch.randint(5, (1000,), generator=g)
    t = torch.linspace(0, 6.28, 24)
    rate = torch.tensor([[1, 1, 2], [2, 1, 1], [1, 2, 1], [2, 2, 1], [1, 3, 2]])[y].float()
    phase = 0.5 * torch.randn(1000, 1, 1, generator=g)
    x = torch.sin(rate.unsqueeze(1) * (t.view(1, 24, 1) + phase)) + 0.4 * torch.randn(1000, 24, 3, generator=g)
    train = TensorDataset(x[:800], y[:800])
    val = TensorDataset(x[800:], y[800:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
