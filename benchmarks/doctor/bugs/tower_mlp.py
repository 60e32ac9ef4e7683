import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Block(nn.Module):
    """A block of a residual network."""

    def __init__(self, width: int):
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x):
        h = torch.sigmoid(self.fc1(x))
        h = self.fc2(h)
        return h


class Task(forge.TaskModule):
    def __init__(self, width: int = 32, depth: int = 14, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.inp = nn.Linear(12, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(1400, 12, generator=g)
    y = (torch.tanh(x @ torch.randn(12, 20, generator=g)) @ torch.randn(20, 5, generator=g)).argmax(1)
    noise = torch.rand(1400, generator=g) < 0.04
    y = torch.where(noise, torch.randint(5, (1400,), generator=g), y)
    dataset = TensorDataset(x, y)
    train, val = random_split(dataset, [1120, len(dataset) - 1120], generator=torch.Generator().manual_seed(17))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
