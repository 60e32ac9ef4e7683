"""Masked language modelling of short sentences: hide 15 % of the tokens and fill them in."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

MASK, VOCAB, LENGTH = 0, 26, 14


class Task(forge.TaskModule):
    def __init__(self, dim=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(LENGTH, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens):
        return self.head(self.encoder(self.tok(tokens) + self.pos))

    def training_step(self, batch):
        (tokens,) = batch
        hidden = torch.rand(tokens.shape, device=tokens.device) < 0.15
        logits = self(tokens.masked_fill(hidden, MASK))
        wanted = tokens.masked_fill(hidden, -100)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)}

    def validation_step(self, batch):
        (tokens,) = batch
        hidden = torch.arange(LENGTH, device=tokens.device).expand_as(tokens) % 7 == 3
        logits = self(tokens.masked_fill(hidden, MASK))
        right = logits.argmax(-1) == tokens
        return {"loss": F.cross_entropy(logits[hidden], tokens[hidden]), "fill_accuracy": right[hidden].float().mean()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data():
    g = torch.Generator().manual_seed(103)
    follow = torch.randperm(VOCAB - 1, generator=g)
    tokens = torch.zeros(560, LENGTH, dtype=torch.long)
    tokens[:, 0] = torch.randint(VOCAB - 1, (560,), generator=g)
    for t in range(1, LENGTH):
        noise = torch.randint(VOCAB - 1, (560,), generator=g)
        keep = torch.rand(560, generator=g) < 0.92
        tokens[:, t] = torch.where(keep, follow[tokens[:, t - 1]], noise)
    tokens += 1
    return SimpleNamespace(
        train=DataLoader(TensorDataset(tokens[:480]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(tokens[480:]), batch_size=20),
    )
