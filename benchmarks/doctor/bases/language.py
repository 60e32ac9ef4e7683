import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, steps, width = x.shape
        q, k, v = self.qkv(x).view(batch, steps, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        future = torch.ones(steps, steps, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, steps, width))


class Task(forge.TaskModule):
    """The next syllable of a line."""

    def __init__(self, syllables: int = 30, width: int = 32, length: int = 16, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(syllables, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))
        self.out = nn.Linear(width, syllables)

    def forward(self, line):
        h = self.embed(line) + self.place[: line.shape[1]]
        h = h + self.attention(self.norms[0](h))
        h = h + self.mlp(self.norms[1](h))
        return self.out(self.norms[2](h))

    def training_step(self, batch):
        (line,) = batch
        logits, target = self(line[:, :-1]), line[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        return {"loss": loss, "accuracy": (logits.argmax(-1) == target).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(81)
    likely = torch.softmax(2 * torch.randn(30, 30, generator=g), 1)
    line = torch.randint(30, (900, 17), generator=g)
    for t in range(1, 17):
        line[:, t] = torch.multinomial(likely[line[:, t - 1]], 1, generator=g).squeeze(1)
    return Splits(
        train=TensorLoader(line[:720], batch_size=32, shuffle=True), val=TensorLoader(line[720:], batch_size=60)
    )
