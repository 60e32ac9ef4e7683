import math

import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = scores.softmax(dim=-2)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Task(forge.TaskModule):
    """Look up, in a list of pairs, the value that belongs to the key asked for."""

    def __init__(self, keys: int = 8, values: int = 6, width: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.keys = nn.Embedding(keys, width)
        self.values = nn.Embedding(values, width)
        self.question = nn.Parameter(torch.randn(width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, values))

    def forward(self, keys, values, asked):
        pairs = self.keys(keys) + self.values(values)
        query = (self.keys(asked) + self.question).unsqueeze(1)
        h = self.blocks(torch.cat([pairs, query], dim=1))
        return self.head(h[:, -1])

    def training_step(self, batch):
        keys, values, asked, answer = batch
        logits = self(keys, values, asked)
        return {"loss": F.cross_entropy(logits, answer), "accuracy": (logits.argmax(1) == answer).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(27)
    keys = torch.rand(1600, 8, generator=g).argsort(1)[:, :4]
    values = torch.randint(6, (1600, 4), generator=g)
    place = torch.randint(4, (1600, 1), generator=g)
    asked, answer = keys.gather(1, place).squeeze(1), values.gather(1, place).squeeze(1)
    wrong = torch.rand(1600, generator=g) < 0.05
    answer = torch.where(wrong, torch.randint(6, (1600,), generator=g), answer)
    columns = keys, values, asked, answer
    return Splits(
        train=TensorLoader(*(c[:1280] for c in columns), batch_size=batch_size, shuffle=True),
        val=TensorLoader(*(c[1280:] for c in columns), batch_size=80),
    )
