import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Which fruit, told mostly by colour."""

    def __init__(self, width: int = 12, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, 24, 3, padding=1), nn.ReLU()
        )
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        return self.out(self.features(x).mean((2, 3)))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


COLOURS = torch.tensor([[0.9, 0.2, 0.2], [0.3, 0.8, 0.3], [0.9, 0.8, 0.2], [0.4, 0.2, 0.7], [0.95, 0.55, 0.15]])


def read(pictures):
    """Bytes in HWC order to floats in CHW order."""
    return (pictures.permute(0, 3, 1, 2).float() / 255 - 0.45) / 0.25


def data() -> Splits:
    g = torch.Generator().manual_seed(91)
    n = 700
    y = torch.randint(5, (n,), generator=g)
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    centre = 4 + 4 * torch.rand(n, 2, 1, 1, generator=g)
    r = 2.5 + 2 * torch.rand(n, 1, 1, generator=g)
    inside = ((xx - centre[:, 0]).square() + (yy - centre[:, 1]).square() < r.square()).unsqueeze(-1)
    pictures = torch.where(inside, COLOURS[y].view(n, 1, 1, 3), torch.tensor(0.4))
    pictures = pictures + 0.12 * torch.randn(n, 12, 12, 3, generator=g)
    pictures = (pictures.clamp(0, 1) * 255).byte()
    train = TensorDataset(read(pictures[:560]), y[:560])
    val = TensorDataset(read(pictures[560:].flip(-1)), y[560:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
