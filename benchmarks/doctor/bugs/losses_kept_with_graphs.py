import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Learn codes of pictures under which two noisy views of one picture are close."""

    def __init__(self, width: int = 32, temperature: float = 0.2, lr: float = 2e-3):
        super().__init__()
        self.temperature = temperature
        self.lr = lr
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12 * 25, width)
        )
        self.losses = []

    def forward(self, images):
        return F.normalize(self.encoder(images), dim=1)

    def contrast(self, batch):
        first, second = batch
        similar = self(first) @ self(second).T / self.temperature
        own = torch.arange(len(first), device=similar.device)
        loss = (F.cross_entropy(similar, own) + F.cross_entropy(similar.T, own)) / 2
        return loss, (similar.argmax(1) == own).float().mean()

    def training_step(self, batch):
        loss, found = self.contrast(batch)
        self.losses.append(loss)
        recent = torch.stack(self.losses[-20:]).mean()
        return {"loss": loss, "found": found, "recent": recent}

    def validation_step(self, batch):
        loss, found = self.contrast(batch)
        return {"loss": loss, "found": found}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(68)
    base = F.avg_pool2d(torch.randn(1000, 1, 12, 12, generator=g), 3, stride=1)
    base = base / base.std()
    first = base + 0.9 * torch.randn(base.shape, generator=g)
    second = base + 0.9 * torch.randn(base.shape, generator=g)
    return Splits(
        train=TensorLoader(first[:800], second[:800], batch_size=batch_size, shuffle=True),
        val=TensorLoader(first[800:], second[800:], batch_size=50),
    )
