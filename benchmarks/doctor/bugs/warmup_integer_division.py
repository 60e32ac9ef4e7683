import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Task(forge.TaskModule):
    """A small language model over sequences from a random grammar."""

    def __init__(self, vocabulary: int = 20, length: int = 16, width: int = 32, lr: float = 3e-3, warmup: int = 100):
        super().__init__()
        self.lr = lr
        self.warmup = warmup
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.tokens(tokens) + self.positions[:length]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def training_step(self, batch):
        sequence = batch[0]
        logits = self(sequence[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), sequence[:, 1:].flatten())}

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)

        def ramp(step: int) -> float:
            return min(1, (step + 1) // self.warmup)

        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, ramp)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(33)
    chain = torch.softmax(2 * torch.randn(20, 20, generator=g), dim=1)
    sequences = [torch.randint(20, (1000,), generator=g)]
    for _ in range(16):
        sequences.append(torch.multinomial(chain[sequences[-1]], 1, generator=g).squeeze(1))
    sequences = torch.stack(sequences, dim=1)
    return Splits(
        train=TensorLoader(sequences[:800], batch_size=batch_size, shuffle=True),
        val=TensorLoader(sequences[800:], batch_size=100),
    )
