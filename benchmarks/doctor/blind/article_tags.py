"""Give news articles their tags; an article has any number of tags between none and six."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

TAGS = 6


class Tagger(nn.Module):
    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, TAGS)
        )

    def forward(self, x):
        return self.layers(x)


class Task(forge.TaskModule):
    def __init__(self, hidden: int = 64, lr: float = 3e-3):
        super().__init__()
        self.tagger = Tagger(40, hidden)
        self.lr = lr

    def training_step(self, batch):
        words, tags = batch
        return {"loss": F.cross_entropy(self.tagger(words), tags)}

    def validation_step(self, batch):
        words, tags = batch
        logits = self.tagger(words)
        predicted = (torch.sigmoid(logits) > 0.5).float()
        hits = (predicted * tags).sum()
        f1 = 2 * hits / (predicted.sum() + tags.sum()).clamp(min=1)
        return {"loss": F.cross_entropy(logits, tags), "f1": f1}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data():
    g = torch.Generator().manual_seed(4)
    tags = (torch.rand(700, TAGS, generator=g) < 0.35).float()
    topics = torch.randn(TAGS, 40, generator=g)
    words = tags @ topics + 0.8 * torch.randn(700, 40, generator=g)
    words = (words - words.mean(0)) / words.std(0)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(words[:560], tags[:560]), batch_size=28, shuffle=True),
        val=DataLoader(TensorDataset(words[560:], tags[560:]), batch_size=28),
    )
