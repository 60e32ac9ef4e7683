"""Tell the language a surname comes from, character by character, with a GRU."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

LETTERS, LENGTH, LANGUAGES = 27, 10, 5


class Task(forge.TaskModule):
    def __init__(self, width: int = 32):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 16)
        self.rnn = nn.GRU(16, width)
        self.classify = nn.Linear(width, LANGUAGES)

    def forward(self, names):
        states, _ = self.rnn(self.embed(names))
        return self.classify(states[:, -1])

    def training_step(self, batch):
        names, languages = batch
        logits = self(names)
        return {
            "loss": F.cross_entropy(logits, languages),
            "accuracy": (logits.argmax(-1) == languages).float().mean(),
        }

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def data():
    g = torch.Generator().manual_seed(3)
    n = 720
    languages = torch.randint(LANGUAGES, (n,), generator=g)
    tables = torch.softmax(1.8 * torch.randn(LANGUAGES, LETTERS, LETTERS, generator=g), -1)
    names = torch.zeros(n, LENGTH, dtype=torch.long)
    names[:, 0] = torch.randint(LETTERS, (n,), generator=g)
    for t in range(1, LENGTH):
        names[:, t] = torch.multinomial(tables[languages, names[:, t - 1]], 1, generator=g).squeeze(1)
    names[:, -1] = torch.randint(LETTERS, (n,), generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(names[:576], languages[:576]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(names[576:], languages[576:]), batch_size=24),
    )
