"""Regress the joints of a hand from depth images: an encoder and a head, both trained from scratch."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
        )
        self.squeeze = nn.Linear(16 * 16, 8)

    def forward(self, image):
        return torch.tanh(self.squeeze(self.convs(image).flatten(1)))


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    @torch.no_grad()
    def features(self, image):
        return self.encoder(image)

    def forward(self, image):
        return self.head(self.features(image))

    def training_step(self, batch):
        image, joints = batch
        return {"loss": F.mse_loss(self(image), joints)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(
            [{"params": self.encoder.parameters(), "lr": 2e-3}, {"params": self.head.parameters(), "lr": 4e-3}]
        )


def data():
    g = torch.Generator().manual_seed(10)
    joints = 2 * torch.rand(500, 4, generator=g) - 1
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    image = torch.zeros(500, 1, 16, 16)
    for a, sign in ((0, 1.0), (2, -1.0)):
        d = (xx - joints[:, a, None, None]) ** 2 + (yy - joints[:, a + 1, None, None]) ** 2
        image[:, 0] += sign * torch.exp(-d / 0.05)
    image = (image - image.mean()) / image.std() + 0.1 * torch.randn(500, 1, 16, 16, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(image[:400], joints[:400]), batch_size=20, shuffle=True),
        val=DataLoader(TensorDataset(image[400:], joints[400:]), batch_size=20),
    )
