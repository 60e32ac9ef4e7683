import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Sort grey pictures of four textures."""

    def __init__(self, width: int = 16, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 4),
        )

    def forward(self, images):
        return self.net(images.float())

    def training_step(self, batch):
        images, texture = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, texture), "accuracy": (logits.argmax(1) == texture).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(62)
    texture = torch.randint(4, (1000,), generator=g)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    waves = torch.stack([rows, columns, rows + columns, rows * columns / 6])
    phase = 6.28 * torch.rand(1000, 1, 1, generator=g)
    grey = 127 + 25 * torch.sin(1.3 * waves[texture] + phase) + 50 * torch.randn(1000, 16, 16, generator=g)
    images = grey.clamp(0, 255).to(torch.uint8).unsqueeze(1)
    return Splits(
        train=TensorLoader(images[:800], texture[:800], batch_size=batch_size, shuffle=True),
        val=TensorLoader(images[800:], texture[800:], batch_size=100),
    )
