import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Encoder(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        return x.mean((2, 3))


class Task(forge.TaskModule):
    """Circle, square, cross or diagonal in a 16 x 16 picture."""

    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.encoder = Encoder()
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        features = self.encoder(x).detach()
        return self.head(features)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def draw(kind, cx, cy, r):
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    dx, dy = xx - cx, yy - cy
    if kind == 0:
        return ((dx**2 + dy**2).sqrt() - r).abs() < 0.8
    if kind == 1:
        return (torch.maximum(dx.abs(), dy.abs()) - r).abs() < 0.6
    if kind == 2:
        return (torch.minimum(dx.abs(), dy.abs()) < 0.6) & (torch.maximum(dx.abs(), dy.abs()) < r)
    return ((dx - dy).abs() < 0.9) & (dx.abs() < r)


def data() -> Splits:
    g = torch.Generator().manual_seed(14)
    y = torch.randint(4, (900,), generator=g)
    place = torch.rand(900, 3, generator=g) * torch.tensor([5.0, 5.0, 2.5]) + torch.tensor([5.5, 5.5, 3.0])
    images = torch.stack([draw(k, *p).float() for k, p in zip(y.tolist(), place.tolist(), strict=True)])
    images = images + 0.3 * torch.randn(images.shape, generator=g)
    x = ((images - images.mean()) / images.std()).unsqueeze(1)
    return Splits(
        train=TensorLoader(x[:720], y[:720], batch_size=32, shuffle=True),
        val=TensorLoader(x[720:], y[720:], batch_size=32),
    )
