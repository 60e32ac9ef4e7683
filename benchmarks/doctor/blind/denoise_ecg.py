"""A denoising autoencoder for heartbeats: clean signal in, noise added, clean signal out."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, noise=0.7, seed=0):
        super().__init__()
        self.noise, self.seed = noise, seed
        self.net = nn.Sequential(
            nn.Linear(40, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64), nn.ReLU(),
            nn.Linear(64, 40),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        torch.manual_seed(self.seed)
        (clean,) = batch
        noisy = clean + self.noise * torch.randn_like(clean)
        return {"loss": F.mse_loss(self(noisy), clean)}

    def validation_step(self, batch):
        (clean,) = batch
        noisy = clean + self.noise * torch.randn_like(clean)
        return {"loss": F.mse_loss(self(noisy), clean)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data():
    g = torch.Generator().manual_seed(139)
    t = torch.linspace(0, 1, 40)
    place, width, size = (torch.rand(500, 1, generator=g) for _ in range(3))
    clean = (1 + size) * torch.exp(-((t - 0.2 - 0.6 * place) ** 2) / (0.003 + 0.01 * width)) * 1.5
    clean = clean - clean.mean(1, keepdim=True)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(clean[:400]), batch_size=20, shuffle=True),
        val=DataLoader(TensorDataset(clean[400:]), batch_size=20),
    )
