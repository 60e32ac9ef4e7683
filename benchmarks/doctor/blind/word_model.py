"""A word-level LSTM language model whose output layer shares the weights of the input embedding."""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

WORDS = 40


class Task(forge.TaskModule):
    def __init__(self, dim=32, lr=5e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(WORDS, dim)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, WORDS, bias=False)
        self.out.weight.data = self.embed.weight.data

    def forward(self, words):
        return self.out(self.lstm(self.embed(words))[0])

    def training_step(self, batch):
        (text,) = batch
        logits = self(text[:, :-1])
        return {"loss": F.cross_entropy(logits.reshape(-1, WORDS), text[:, 1:].reshape(-1))}

    def validation_step(self, batch):
        return self.training_step(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data():
    g = torch.Generator().manual_seed(67)
    table = torch.softmax(2.5 * torch.randn(WORDS, WORDS, generator=g), -1)
    text = torch.zeros(480, 13, dtype=torch.long)
    text[:, 0] = torch.randint(WORDS, (480,), generator=g)
    for t in range(12):
        text[:, t + 1] = torch.multinomial(table[text[:, t]], 1, generator=g)[:, 0]
    return SimpleNamespace(
        train=DataLoader(TensorDataset(text[:400]), batch_size=20, shuffle=True),
        val=DataLoader(TensorDataset(text[400:]), batch_size=20),
    )
