import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Tissue from the activity of forty genes."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.fc1 = nn.Linear(40, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 6)

    def standardize(self, h):
        return (h - h.mean(0)) / (h.std(0, unbiased=False) + 1e-5)

    def forward(self, x):
        h = F.relu(self.standardize(self.fc1(x)))
        h = F.relu(self.standardize(self.fc2(h)))
        return self.out(h)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(34)
    y = torch.randint(6, (1200,), generator=g)
    pattern = 0.6 * torch.randn(6, 40, generator=g)
    x = pattern[y] * (0.5 + torch.rand(1200, 1, generator=g)) + torch.randn(1200, 40, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    dataset = TensorDataset(x, y)
    train, val = Subset(dataset, range(960)), Subset(dataset, range(960, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
