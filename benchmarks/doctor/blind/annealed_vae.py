"""A VAE of gene expression profiles; the weight of the KL term grows from 0 to 1 over the first 100 updates."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, latent=3, anneal=100):
        super().__init__()
        self.anneal = anneal
        self.seen = 0
        self.enc = nn.Sequential(nn.Linear(30, 64), nn.ReLU())
        self.mu, self.log_var = nn.Linear(64, latent), nn.Linear(64, latent)
        self.dec = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 30))

    def elbo(self, x):
        h = self.enc(x)
        mu, log_var = self.mu(h), self.log_var(h)
        z = mu + torch.exp(0.5 * log_var) * torch.randn_like(mu)
        reconstruction = 0.5 * F.mse_loss(self.dec(z), x, reduction="none").sum(1).mean()
        kl = 0.5 * (mu**2 + log_var.exp() - 1 - log_var).sum(1).mean()
        return reconstruction, kl

    def training_step(self, batch):
        self.seen += 1
        beta = min(1.0, self.seen / self.anneal)
        reconstruction, kl = self.elbo(batch[0])
        return {"loss": reconstruction + beta * kl, "kl": kl.detach(), "beta": beta}

    def validation_step(self, batch):
        reconstruction, kl = self.elbo(batch[0])
        return {"loss": reconstruction + kl}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def data():
    g = torch.Generator().manual_seed(79)
    x = torch.tanh(torch.randn(600, 3, generator=g) @ torch.randn(3, 30, generator=g))
    x = (x + 0.2 * torch.randn(600, 30, generator=g)) / x.std()
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:480]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(x[480:]), batch_size=24),
    )
