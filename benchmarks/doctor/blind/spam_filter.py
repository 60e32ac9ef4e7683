"""A bag-of-words spam filter with one output."""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(80, 16, mode="mean")
        self.out = nn.Linear(16, 1)
        self.bce = nn.BCEWithLogitsLoss()

    def forward(self, words):
        return self.out(torch.relu(self.bag(words)))

    def training_step(self, batch):
        words, spam = batch
        return {"loss": self.bce(self(words), spam.float().unsqueeze(1))}

    def validation_step(self, batch):
        words, spam = batch
        logits = self(words)
        loss = self.bce(logits, spam.float().unsqueeze(1))
        predicted = logits.argmax(dim=1)
        return {"loss": loss, "accuracy": (predicted == spam).float().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def data():
    g = torch.Generator().manual_seed(149)
    spam = torch.randint(2, (600,), generator=g)
    common = torch.randint(0, 60, (600, 20), generator=g)
    special = torch.where(spam[:, None] > 0, 60, 70) + torch.randint(10, (600, 20), generator=g)
    words = torch.where(torch.rand(600, 20, generator=g) < 0.15, special, common)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(words[:480], spam[:480]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(words[480:], spam[480:]), batch_size=24),
    )
