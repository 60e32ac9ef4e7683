"""A variational autoencoder of small images with one bright blob."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 144))

    def posterior(self, images):
        mean, raw = self.encoder(images).chunk(2, dim=1)
        return D.Normal(mean, F.softplus(raw) + 1e-3)

    def elbo(self, images):
        q = self.posterior(images)
        z = q.sample()
        logits = self.decoder(z)
        reconstruction = F.binary_cross_entropy_with_logits(
            logits, images.flatten(1), reduction="none"
        ).sum(1)
        kl = D.kl_divergence(q, D.Normal(torch.zeros_like(q.mean), torch.ones_like(q.stddev))).sum(1)
        return reconstruction.mean(), kl.mean()

    def training_step(self, batch):
        reconstruction, kl = self.elbo(batch[0])
        return {"loss": reconstruction + kl, "reconstruction": reconstruction.detach(), "kl": kl.detach()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data():
    g = torch.Generator().manual_seed(8)
    centre = 2 + 8 * torch.rand(600, 2, 1, 1, generator=g)
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    images = torch.exp(-((yy - centre[:, 0]) ** 2 + (xx - centre[:, 1]) ** 2) / 6)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(images[:480]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(images[480:]), batch_size=24),
    )
