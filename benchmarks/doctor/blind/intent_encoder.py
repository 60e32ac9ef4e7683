"""Classify the intent of short padded utterances with nn.TransformerEncoder."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

import forge

PAD = 0


def collate(samples):
    width = 15
    tokens = torch.full((len(samples), width), PAD)
    for row, (words, _) in enumerate(samples):
        tokens[row, : len(words)] = words
    return {"tokens": tokens, "mask": tokens != PAD, "intent": torch.tensor([k for _, k in samples])}


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(60, 32, padding_idx=PAD)
        self.pos = nn.Embedding(15, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, tokens, mask):
        x = self.emb(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        h = self.encoder(x, src_key_padding_mask=mask)
        return self.head(h[:, 0])

    def training_step(self, batch):
        logits = self(batch["tokens"], batch["mask"])
        return {
            "loss": F.cross_entropy(logits, batch["intent"]),
            "acc": (logits.argmax(1) == batch["intent"]).float().mean(),
        }

    def validation_step(self, batch):
        return self.training_step(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def data():
    g = torch.Generator().manual_seed(5)
    samples = []
    for _ in range(600):
        k = int(torch.randint(4, (1,), generator=g))
        n = int(torch.randint(5, 14, (1,), generator=g))
        words = torch.randint(2, 30, (n,), generator=g)
        own = 30 + 7 * k + torch.randint(7, (n,), generator=g)
        words = torch.where(torch.rand(n, generator=g) < 0.3, own, words)
        words[0] = 1
        samples.append((words, k))
    return SimpleNamespace(
        train=DataLoader(samples[:480], batch_size=24, shuffle=True, collate_fn=collate),
        val=DataLoader(samples[480:], batch_size=24, collate_fn=collate),
    )
