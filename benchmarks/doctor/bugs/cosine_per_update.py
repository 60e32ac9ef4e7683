import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR


class Task(forge.TaskModule):
    """Name the class of a picture made of two colour fields."""

    def __init__(self, epochs: int = 10, lr: float = 0.05):
        super().__init__()
        self.epochs = epochs
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24 * 36, 5),
        )

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch):
        images, labels = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=5e-4)
        return optimizer, CosineAnnealingLR(optimizer, T_max=self.epochs)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(71)
    palette = torch.randn(5, 2, 3, generator=g)
    labels = torch.randint(5, (800,), generator=g)
    border = torch.randint(3, 10, (800, 1, 1, 1), generator=g)
    left = torch.arange(12).view(1, 1, 1, 12) < border
    colours = palette[labels].unsqueeze(-1).unsqueeze(-1)
    images = torch.where(left, colours[:, 0], colours[:, 1]).expand(-1, -1, 12, -1)
    images = images + 5 * torch.randn(800, 3, 12, 12, generator=g)
    images = (images - images[:640].mean()) / images[:640].std()
    return Splits(
        train=TensorLoader(images[:640], labels[:640], batch_size=batch_size, shuffle=True),
        val=TensorLoader(images[640:], labels[640:], batch_size=80),
    )
