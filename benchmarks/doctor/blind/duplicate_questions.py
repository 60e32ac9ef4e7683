"""Metric learning: embed questions so that duplicates are close and other pairs are far apart."""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, margin=0.2):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 12))
        self.criterion = nn.CosineEmbeddingLoss(margin=margin)

    def training_step(self, batch):
        a, b, same = batch
        return {"loss": self.criterion(self.embed(a), self.embed(b), same)}

    def validation_step(self, batch):
        a, b, same = batch
        cosine = torch.cosine_similarity(self.embed(a), self.embed(b))
        return {
            "loss": self.criterion(self.embed(a), self.embed(b), same),
            "accuracy": ((cosine > 0.6) == (same == 1)).float().mean(),
        }

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def data():
    g = torch.Generator().manual_seed(173)
    n = 640
    meanings = torch.randn(40, 24, generator=g)
    first = torch.randint(40, (n,), generator=g)
    same = torch.randint(2, (n,), generator=g)
    other = (first + torch.randint(1, 40, (n,), generator=g)) % 40
    second = torch.where(same == 1, first, other)
    a = meanings[first] + 0.7 * torch.randn(n, 24, generator=g)
    b = meanings[second] + 0.7 * torch.randn(n, 24, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(a[:512], b[:512], same[:512]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(a[512:], b[512:], same[512:]), batch_size=32),
    )
