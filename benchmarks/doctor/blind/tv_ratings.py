"""Predict whether a viewer finishes a show, with a regularised MLP over learned embeddings."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, viewers=50, shows=30, dim=12, dropout=0.9):
        super().__init__()
        self.viewer, self.show = nn.Embedding(viewers, dim), nn.Embedding(shows, dim)
        self.mlp = nn.Sequential(
            nn.Linear(2 * dim, 48), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(48, 24), nn.ReLU(), nn.Dropout(dropout), nn.Linear(24, 1),
        )

    def forward(self, v, s):
        return self.mlp(torch.cat([self.viewer(v), self.show(s)], 1)).squeeze(1)

    def training_step(self, batch):
        v, s, finished = batch
        return {"loss": F.binary_cross_entropy_with_logits(self(v, s), finished)}

    def validation_step(self, batch):
        v, s, finished = batch
        logit = self(v, s)
        return {
            "loss": F.binary_cross_entropy_with_logits(logit, finished),
            "accuracy": ((logit > 0).float() == finished).float().mean(),
        }

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def data():
    g = torch.Generator().manual_seed(131)
    pairs = torch.cartesian_prod(torch.arange(50), torch.arange(30))[torch.randperm(1500, generator=g)]
    v, s = pairs.T.contiguous()
    p, q = torch.randn(50, generator=g), torch.randn(30, generator=g)
    finished = ((p[v] + q[s] + 0.3 * torch.randn(1500, generator=g)) > 0).float()
    return SimpleNamespace(
        train=DataLoader(TensorDataset(v[:1200], s[:1200], finished[:1200]), batch_size=40, shuffle=True),
        val=DataLoader(TensorDataset(v[1200:], s[1200:], finished[1200:]), batch_size=40),
    )
