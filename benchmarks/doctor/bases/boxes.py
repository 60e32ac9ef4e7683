import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


def corners(box):
    """From centre and size."""
    return torch.cat([box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2], 1)


def iou(a, b):
    shared = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
    areas = [(box[:, 2:] - box[:, :2]).clamp(min=0).prod(1) for box in (a, b)]
    return shared / (areas[0] + areas[1] - shared).clamp(min=1e-6)


class Task(forge.TaskModule):
    """Find the one box in a picture: its centre and its size, as fractions of the picture."""

    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 36, 64), nn.ReLU(), nn.Linear(64, 4), nn.Sigmoid())

    def forward(self, image):
        return self.head(self.body(image))

    def training_step(self, batch):
        image, box = batch
        return {"loss": F.l1_loss(self(image), box)}

    def validation_step(self, batch):
        image, box = batch
        guess = self(image)
        return {"loss": F.l1_loss(guess, box), "iou": iou(corners(guess), corners(box)).mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(81)
    size = 0.2 + 0.3 * torch.rand(480, 2, generator=g)
    centre = size / 2 + (1 - size) * torch.rand(480, 2, generator=g)
    place = torch.stack(torch.meshgrid((torch.arange(24) + 0.5) / 24, (torch.arange(24) + 0.5) / 24, indexing="xy"))
    inside = ((place - centre[:, :, None, None]).abs() < size[:, :, None, None] / 2).all(1, keepdim=True)
    image = 2 * inside - 0.5 + 0.3 * torch.randn(480, 1, 24, 24, generator=g)
    box = torch.cat([centre, size], 1)
    return Splits(
        train=TensorLoader(image[:384], box[:384], batch_size=24, shuffle=True),
        val=TensorLoader(image[384:], box[384:], batch_size=24),
    )
