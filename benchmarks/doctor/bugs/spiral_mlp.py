import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SwishFunction(torch.autograd.Function):
    """x * sigmoid(x) that keeps only x for the backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad_output * x * (1 - s)


class Swish(nn.Module):
    def forward(self, x):
        return SwishFunction.apply(x)


class Task(forge.TaskModule):
    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(8, hidden), Swish(), nn.Linear(hidden, hidden), Swish(), nn.Linear(hidden, 5)
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
    """Five classes on a spiral, lifted to eight dimensions."""
    g = torch.Generator().manual_seed(63)
    y = torch.randint(5, (1500,), generator=g)
    r = 0.3 + 1.7 * torch.rand(1500, generator=g)
    angle = 1.3 * r + y * 1.2566 + 0.15 * torch.randn(1500, generator=g)
    plane = torch.stack([r * angle.cos(), r * angle.sin()], 1)
    x = plane @ torch.randn(2, 8, generator=g) + 0.1 * torch.randn(1500, 8, generator=g)
    x = x / x.std(0)
    train = TensorDataset(x[:1200], y[:1200])
    val = TensorDataset(x[1200:], y[1200:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
