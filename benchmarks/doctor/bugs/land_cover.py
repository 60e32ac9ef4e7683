import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Land cover of small tiles."""

    def __init__(self, width: int = 12, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 4),
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
    g = torch.Generator().manual_seed(53)
    y = torch.randint(4, (400,), generator=g)
    colour = torch.randn(4, 3, 1, 1, generator=g)
    rough = torch.tensor([0.3, 0.6, 0.9, 1.2])[y].view(-1, 1, 1, 1)
    x = colour[y] + rough * torch.randn(400, 3, 10, 10, generator=g) + 0.4 * torch.randn(400, 3, 1, 1, generator=g)
    x = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)
    return Splits(
        train=DataLoader(TensorDataset(x[:300], y[:300]), batch_size=1, shuffle=True),
        val=DataLoader(TensorDataset(x[300:], y[300:]), batch_size=50),
    )
