import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Spectral class of a star."""

    def __init__(self, width: int = 16, lr: float = 3e-3, beta1: float = 0.999, beta2: float = 0.9):
        super().__init__()
        self.lr = lr
        self.betas = (beta1, beta2)
        self.features = nn.Sequential(
            nn.Conv1d(1, width, 7, padding=3),
            nn.ReLU(),
            nn.MaxPool1d(4),
            nn.Conv1d(width, width, 5, padding=2),
            nn.ReLU(),
        )
        self.out = nn.Linear(10 * width, 5)

    def forward(self, x):
        return self.out(self.features(x.unsqueeze(1)).flatten(1))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr, betas=self.betas)


def data() -> Splits:
    g = torch.Generator().manual_seed(40)
    y = torch.randint(5, (1000,), generator=g)
    bands = torch.arange(40.0)
    slope = (y - 2).float().unsqueeze(1) * (bands - 20) / 40
    lines = torch.rand(5, 40, generator=g) < 0.12
    x = slope - lines[y].float() * 1.2 + 0.6 * torch.randn(1000, 40, generator=g)
    x = (x - x.mean()) / x.std()
    dataset = TensorDataset(x, y)
    train, val = Subset(dataset, range(800)), Subset(dataset, range(800, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
