import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Backbone(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, width)
        self.conv = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(4, 2 * width)
        self.width = 2 * width

    def forward(self, images):
        h = F.relu(self.norm1(self.stem(images)))
        h = F.relu(self.norm2(self.conv(h)))
        return h.mean(dim=(2, 3))


class Task(forge.TaskModule):
    """Recognise the direction of the stripes in a noisy picture."""

    def __init__(self, directions: int = 6, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.backbone = Backbone()
        self.head = nn.Linear(self.backbone.width, directions)

    def forward(self, images):
        with torch.no_grad():
            features = self.backbone(images)
        return self.head(features)

    def training_step(self, batch):
        images, direction = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, direction), "accuracy": (logits.argmax(1) == direction).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(9)
    direction = torch.randint(6, (1000,), generator=g)
    angle = direction * torch.pi / 6
    phase = 2 * torch.pi * torch.rand(1000, 1, 1, generator=g)
    rows, columns = torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij")
    along = torch.cos(angle).view(-1, 1, 1) * rows + torch.sin(angle).view(-1, 1, 1) * columns
    images = 0.6 * torch.sin(1.6 * along + phase) + 0.9 * torch.randn(1000, 14, 14, generator=g)
    images = images.unsqueeze(1)
    return Splits(
        train=TensorLoader(images[:800], direction[:800], batch_size=batch_size, shuffle=True),
        val=TensorLoader(images[800:], direction[800:], batch_size=100),
    )
