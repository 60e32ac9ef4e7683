"""An autoencoder with a bottleneck of 12 binary codes, for hashing documents."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Binarize(nn.Module):
    def forward(self, h):
        return torch.sign(torch.tanh(h))


class Task(forge.TaskModule):
    def __init__(self, bits: int = 12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, bits))
        self.binarize = Binarize()
        self.decoder = nn.Sequential(nn.Linear(bits, 64), nn.ReLU(), nn.Linear(64, 24))

    def forward(self, x):
        return self.decoder(self.binarize(self.encoder(x)))

    def training_step(self, batch):
        (x,) = batch
        return {"loss": F.mse_loss(self(x), x)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data():
    g = torch.Generator().manual_seed(101)
    bits = torch.randint(0, 2, (700, 6), generator=g).float() * 2 - 1
    x = bits @ torch.randn(6, 24, generator=g) / 6**0.5 + 0.2 * torch.randn(700, 24, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:560]), batch_size=28, shuffle=True),
        val=DataLoader(TensorDataset(x[560:]), batch_size=28),
    )
