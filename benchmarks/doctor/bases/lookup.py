import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        parts = self.query(x), self.key(x), self.value(x)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        weights = scores.softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Task(forge.TaskModule):
    """Look up, in a list of pairs, the value that belongs to the key asked for."""

    def __init__(self, keys: int = 8, values: int = 6, width: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.keys, self.values = nn.Embedding(keys, width), nn.Embedding(values, width)
        self.question = nn.Parameter(torch.randn(width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.ModuleList(Attention(width) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, values))

    def forward(self, keys, values, asked):
        pairs = self.keys(keys) + self.values(values)
        query = (self.keys(asked) + self.question).unsqueeze(1)
        h = torch.cat([pairs, query], dim=1)
        for norm, attention in zip(self.norms, self.attention, strict=True):
            h = h + attention(norm(h))
        return self.head(h[:, -1])

    def training_step(self, batch):
        keys, values, asked, answer = batch
        logits = self(keys, values, asked)
        return {"loss": F.cross_entropy(logits, answer), "accuracy": (logits.argmax(1) == answer).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(27)
    keys = torch.rand(1600, 8, generator=g).argsort(1)[:, :4]
    values = torch.randint(6, (1600, 4), generator=g)
    place = torch.randint(4, (1600, 1), generator=g)
    columns = keys, values, keys.gather(1, place).squeeze(1), values.gather(1, place).squeeze(1)
    return Splits(
        train=TensorLoader(*(c[:1280] for c in columns), batch_size=32, shuffle=True),
        val=TensorLoader(*(c[1280:] for c in columns), batch_size=80),
    )
