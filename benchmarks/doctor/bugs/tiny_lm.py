import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Task(forge.TaskModule):
    def __init__(self, vocabulary: int = 30, width: int = 32, context: int = 24, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        h = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.out(self.norm(self.blocks(h)))

    def training_step(self, batch):
        (tokens,) = batch
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    """Sequences of a random second-order process."""
    g = torch.Generator().manual_seed(36)
    likely = torch.softmax(2.0 * torch.randn(30, 30, generator=g), 1)
    tokens = torch.randint(30, (600, 25), generator=g)
    for t in range(1, 25):
        tokens[:, t] = torch.multinomial(likely[tokens[:, t - 1]], 1, generator=g).squeeze(1)
    train = TensorDataset(tokens[:480])
    val = TensorDataset(tokens[480:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
