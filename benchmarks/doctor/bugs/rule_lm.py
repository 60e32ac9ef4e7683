import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def split(self, x):
        batch, steps, width = x.shape
        return x.reshape(batch, self.heads, steps, width // self.heads)

    def forward(self, x):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h.reshape(x.shape))


class Task(forge.TaskModule):
    def __init__(self, vocabulary: int = 32, width: int = 32, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.mlp = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        h = self.embed(tokens) + self.position[: tokens.shape[1]]
        h = h + self.attention(self.norm1(h))
        h = h + self.mlp(self.norm2(h))
        return self.out(h)

    def training_step(self, batch):
        (tokens,) = batch
        logits = self(tokens[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    """Each token follows from the two before it."""
    g = torch.Generator().manual_seed(86)
    rule = torch.randint(32, (32, 32), generator=g) % 12
    tokens = torch.randint(12, (900, 2), generator=g)
    for _ in range(15):
        following = rule[tokens[:, -1], tokens[:, -2]]
        other = torch.randint(12, (900,), generator=g)
        following = torch.where(torch.rand(900, generator=g) < 0.15, other, following)
        tokens = torch.cat([tokens, following.unsqueeze(1)], 1)
    dataset = TensorDataset(tokens)
    train, val = Subset(dataset, range(720)), Subset(dataset, range(720, len(tokens)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
