"""Generate melodies: a small transformer predicts the next note."""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

NOTES, BARS, DIM = 24, 20, 32


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.ln2(x))


class Task(forge.TaskModule):
    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.notes = nn.Embedding(NOTES, DIM)
        self.places = nn.Parameter(0.02 * torch.randn(BARS, DIM))
        self.blocks = nn.Sequential(Block(DIM, 4), Block(DIM, 4))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, NOTES)

    def forward(self, notes):
        x = self.notes(notes) + self.places[: notes.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def training_step(self, batch):
        (melody,) = batch
        logits = self(melody[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), melody[:, 1:].flatten())
        return {"loss": loss, "perplexity": loss.detach().exp()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)


def data():
    g = torch.Generator().manual_seed(21)
    table = torch.softmax(2.0 * torch.randn(NOTES, NOTES, generator=g), -1)
    songs = torch.zeros(480, BARS + 1, dtype=torch.long)
    songs[:, 0] = torch.randint(NOTES, (480,), generator=g)
    for t in range(BARS):
        songs[:, t + 1] = torch.multinomial(table[songs[:, t]], 1, generator=g)[:, 0]
    return SimpleNamespace(
        train=DataLoader(TensorDataset(songs[:400]), batch_size=20, shuffle=True),
        val=DataLoader(TensorDataset(songs[400:]), batch_size=20),
    )
