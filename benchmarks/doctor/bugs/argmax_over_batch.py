import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn

CELLS = 16


def accuracy(logits, labels):
    return (logits.argmax(dim=0) == labels).float().mean()


class Task(forge.TaskModule):
    """Find in which of the sixteen cells of a field a source is, from twelve receivers."""

    def __init__(self, receivers: int = 12, hidden: int = 96, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(receivers, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CELLS)
        )

    def forward(self, levels):
        return self.net(levels)

    def training_step(self, batch):
        levels, cell = batch
        logits = self(levels)
        return {"loss": F.cross_entropy(logits, cell), "accuracy": accuracy(logits, cell)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 16) -> Splits:
    g = torch.Generator().manual_seed(83)
    cell = torch.randint(CELLS, (1280,), generator=g)
    corner = torch.stack([cell // 4, cell % 4], dim=1)
    place = corner + torch.rand(1280, 2, generator=g)
    receivers = 4 * torch.rand(12, 2, generator=g)
    levels = torch.exp(-torch.cdist(place, receivers)) + 0.02 * torch.randn(1280, 12, generator=g)
    levels = (levels - levels[:1024].mean(0)) / levels[:1024].std(0)
    return Splits(
        train=TensorLoader(levels[:1024], cell[:1024], batch_size=batch_size, shuffle=True),
        val=TensorLoader(levels[1024:], cell[1024:], batch_size=batch_size),
    )
