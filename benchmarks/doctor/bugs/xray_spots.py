import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Find out whether a picture shows one, two or three spots."""

    def __init__(self, width: int = 16, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 3),
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
    g = torch.Generator().manual_seed(80)
    n = 600
    y = torch.randint(3, (n,), generator=g)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    images = torch.zeros(n, 16, 16)
    for spot in range(3):
        c = 2 + 12 * torch.rand(n, 2, 1, 1, generator=g)
        blob = torch.exp(-((xx - c[:, 0]).square() + (yy - c[:, 1]).square()) / 3)
        images = torch.maximum(images, blob * (y >= spot).view(n, 1, 1))
    images = (0.8 * images + 0.08 * torch.rand(n, 16, 16, generator=g)).clamp(0, 1)
    x = images.byte().float().unsqueeze(1) / 255
    dataset = TensorDataset(x, y)
    train, val = Subset(dataset, range(480)), Subset(dataset, range(480, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
