import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 32


class Task(forge.TaskModule):
    """Suit of a card from a small picture."""

    def __init__(self, width: int = 12, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(25 * width, 48),
            nn.ReLU(),
            nn.Linear(48, 4),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        correct = (logits.argmax(1) == y).sum()
        return {"loss": F.cross_entropy(logits, y), "accuracy": correct / BATCH_SIZE}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(28)
    n = 1000
    y = torch.randint(4, (n,), generator=g)
    suits = torch.rand(4, 6, 6, generator=g) < 0.45
    x = 0.5 * torch.randn(n, 10, 10, generator=g)
    for i, (r, c) in enumerate(torch.randint(0, 5, (n, 2), generator=g).tolist()):
        x[i, r : r + 6, c : c + 6] += suits[y[i]].float()
    x = ((x - x.mean()) / x.std()).unsqueeze(1)
    return Splits(
        train=DataLoader(TensorDataset(x[:800], y[:800]), batch_size=BATCH_SIZE, shuffle=True),
        val=DataLoader(TensorDataset(x[800:], y[800:]), batch_size=100),
    )
