"""Fit one picture with a coordinate network: Fourier features of a pixel's place give its brightness."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

SIDE = 40


class Fourier(nn.Module):
    def __init__(self, octaves=4):
        super().__init__()
        self.register_buffer("frequency", torch.pi * 2.0 ** torch.arange(octaves))

    def forward(self, xy):
        angle = (xy[..., None] * self.frequency).flatten(1)
        return torch.cat([angle.sin(), angle.cos()], 1)


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.encode = Fourier()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, pixel):
        return self.net(self.encode((pixel // SIDE).float())).squeeze(1)

    def training_step(self, batch):
        pixel, value = batch
        loss = F.mse_loss(self(pixel), value)
        return {"loss": loss, "psnr": -10 * torch.log10(loss.detach())}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data():
    g = torch.Generator().manual_seed(181)
    pixel = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))[torch.randperm(SIDE * SIDE, generator=g)]
    x, y = (pixel / SIDE).T
    value = 0.5 + 0.3 * torch.sin(9 * x + 3 * y) + 0.2 * torch.cos(14 * y * x)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(pixel[:1280], value[:1280]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(pixel[1280:], value[1280:]), batch_size=32),
    )
