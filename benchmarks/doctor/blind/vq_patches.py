"""A vector-quantised autoencoder of small patches; the codebook follows the encoder as a moving average."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Quantizer(nn.Module):
    def __init__(self, codes=32, dim=8, decay=0.9):
        super().__init__()
        self.decay = decay
        self.codebook = 0.2 * torch.randn(codes, dim)
        self.usage = torch.ones(codes)

    def forward(self, z):
        index = torch.cdist(z, self.codebook).argmin(1)
        q = self.codebook[index]
        if self.training:
            self.follow(z.detach(), index)
        commitment = F.mse_loss(z, q.detach())
        return z + (q - z).detach(), commitment

    @torch.no_grad()
    def follow(self, z, index):
        hot = F.one_hot(index, len(self.codebook)).float()
        count = hot.sum(0)
        mean = (hot.T @ z) / count.clamp(min=1)[:, None]
        moved = torch.lerp(mean, self.codebook, self.decay)
        self.codebook = torch.where(count[:, None] > 0, moved, self.codebook)
        self.usage = self.decay * self.usage + (1 - self.decay) * count


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(36, 48), nn.ReLU(), nn.Linear(48, 8))
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 36))

    def training_step(self, batch):
        (x,) = batch
        q, commitment = self.quantizer(self.encoder(x))
        reconstruction = F.mse_loss(self.decoder(q), x)
        return {"loss": reconstruction + 0.25 * commitment, "reconstruction": reconstruction.detach()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data():
    g = torch.Generator().manual_seed(73)
    kinds = torch.randn(12, 36, generator=g)
    x = kinds[torch.randint(12, (640,), generator=g)] + 0.3 * torch.randn(640, 36, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:512]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(x[512:]), batch_size=32),
    )
