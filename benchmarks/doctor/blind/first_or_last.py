"""Say which of two special tokens came first in a sequence, with a transformer and sinusoidal positions."""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=200):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[: x.size(0)]


class Task(forge.TaskModule):
    def __init__(self, d=32):
        super().__init__()
        self.tok = nn.Embedding(20, d)
        self.pos = PositionalEncoding(d)
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cls = nn.Linear(d, 2)

    def forward(self, tokens):
        return self.cls(self.enc(self.pos(self.tok(tokens))).mean(1))

    def training_step(self, batch):
        tokens, y = batch
        logits = self(tokens)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def data():
    g = torch.Generator().manual_seed(59)
    n, t = 960, 10
    tokens = torch.randint(2, 20, (n, t), generator=g)
    y = torch.randint(2, (n,), generator=g)
    for i in range(n):
        a, b = sorted(torch.randperm(t, generator=g)[:2].tolist())
        tokens[i, a], tokens[i, b] = y[i], 1 - y[i]
    return SimpleNamespace(
        train=DataLoader(TensorDataset(tokens[:800], y[:800]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(tokens[800:], y[800:]), batch_size=32),
    )
