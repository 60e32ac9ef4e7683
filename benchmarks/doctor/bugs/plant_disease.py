import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Disease of a plant from a photo of a leaf."""

    def __init__(self, width: int = 12, lr: float = 2e-3, encoder_lr: float = 0.0):
        super().__init__()
        self.lr = lr
        self.encoder_lr = encoder_lr
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width * 16, 4)

    def forward(self, x):
        return self.head(self.encoder(x))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(
            [
                {"params": self.encoder.parameters(), "lr": self.encoder_lr},
                {"params": self.head.parameters(), "lr": self.lr},
            ]
        )


def data() -> Splits:
    g = torch.Generator().manual_seed(36)
    n = 600
    y = torch.randint(4, (n,), generator=g)
    yy, xx = torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij")
    x = 0.8 * torch.randn(n, 3, 14, 14, generator=g)
    for spot in range(3):
        c = 2 + 10 * torch.rand(n, 2, 1, 1, generator=g)
        near = torch.exp(-((xx - c[:, 0]).square() + (yy - c[:, 1]).square()) / 4)
        x[:, spot] += 2.5 * near * (y > spot).view(n, 1, 1)
    dataset = TensorDataset(x, y)
    train, val = Subset(dataset, range(480)), Subset(dataset, range(480, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
