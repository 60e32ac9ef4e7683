import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


class Task(forge.TaskModule):
    """Four kinds of defects, two of them rare."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(18, hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 4),
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
    g = torch.Generator().manual_seed(12)
    y = torch.multinomial(torch.tensor([0.5, 0.35, 0.1, 0.05]), 1500, replacement=True, generator=g)
    centres = 0.8 * torch.randn(4, 18, generator=g)
    x = centres[y] + torch.randn(1500, 18, generator=g)
    train = TensorDataset(x[:1200], y[:1200])
    val = TensorDataset(x[1200:], y[1200:])
    counts = torch.bincount(y[:1200], minlength=4)
    sampler = WeightedRandomSampler(1.0 / counts, num_samples=len(train), replacement=True)
    return Splits(train=DataLoader(train, batch_size=32, sampler=sampler), val=DataLoader(val, batch_size=64))
