import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return -ctx.strength * grad_output, None


class Task(forge.TaskModule):
    """Classify scans of two hospitals with features that do not tell the hospital."""

    def __init__(self, hidden: int = 64, strength: float = 0.3, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.strength = strength
        self.encoder = nn.Sequential(nn.Linear(18, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.diagnosis = nn.Linear(hidden, 4)
        self.site = nn.Sequential(nn.Linear(hidden, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        h = Reverse.apply(self.encoder(x), self.strength)
        return self.diagnosis(h), self.site(h)

    def training_step(self, batch):
        x, y, site = batch
        diagnosis, where = self(x)
        main = F.cross_entropy(diagnosis, y)
        adversary = F.cross_entropy(where, site)
        accuracy = (diagnosis.argmax(1) == y).float().mean()
        return {"loss": main + adversary, "diagnosis_loss": main, "accuracy": accuracy}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(23)
    site = torch.randint(2, (1500,), generator=g)
    y = torch.randint(4, (1500,), generator=g)
    centres, shift = 0.9 * torch.randn(4, 18, generator=g), 0.5 * torch.randn(2, 18, generator=g)
    x = centres[y] + shift[site] + torch.randn(1500, 18, generator=g)
    dataset = TensorDataset(x, y, site)
    train, val = Subset(dataset, range(1200)), Subset(dataset, range(1200, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
