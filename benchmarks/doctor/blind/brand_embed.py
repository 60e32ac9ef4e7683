"""Contrastive embedding of product photos and their descriptions, on the unit sphere."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Tower(nn.Module):
    def __init__(self, inputs, dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x):
        return F.normalize(self.mlp(x), dim=0)


class Task(forge.TaskModule):
    def __init__(self, dim=16, temperature=0.1):
        super().__init__()
        self.temperature = temperature
        self.photo = Tower(30, dim)
        self.text = Tower(20, dim)

    def similarity(self, batch):
        photo, text = batch
        return self.photo(photo) @ self.text(text).T / self.temperature

    def training_step(self, batch):
        s = self.similarity(batch)
        y = torch.arange(len(s), device=s.device)
        return {"loss": 0.5 * (F.cross_entropy(s, y) + F.cross_entropy(s.T, y))}

    def validation_step(self, batch):
        s = self.similarity(batch)
        y = torch.arange(len(s), device=s.device)
        return {"loss": F.cross_entropy(s, y), "recall_at_1": (s.argmax(1) == y).float().mean()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def data():
    g = torch.Generator().manual_seed(89)
    product = torch.randn(640, 6, generator=g)
    photo = torch.tanh(product @ torch.randn(6, 30, generator=g)) + 0.1 * torch.randn(640, 30, generator=g)
    text = torch.tanh(product @ torch.randn(6, 20, generator=g)) + 0.1 * torch.randn(640, 20, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(photo[:512], text[:512]), batch_size=32, shuffle=True, drop_last=True),
        val=DataLoader(TensorDataset(photo[512:], text[512:]), batch_size=32),
    )
