import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, steps, width = x.shape
        q, k, v = self.qkv(x).view(batch, steps, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        future = torch.ones(steps, steps, dtype=torch.bool, device=x.device).triu(diagonal=2)
        scores = scores.masked_fill(future, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, steps, width))


class Task(forge.TaskModule):
    def __init__(self, vocabulary: int = 40, width: int = 32, length: int = 20, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = CausalAttention(width, 4)
        self.mlp = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, width))
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.out(self.norms[2](x))

    def training_step(self, batch):
        inputs, targets = batch
        logits = self(inputs)
        loss = F.cross_entropy(logits.transpose(1, 2), targets)
        return {"loss": loss, "accuracy": (logits.argmax(-1) == targets).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(9)
    step = torch.randint(1, 40, (40, 3), generator=g)
    sequence = torch.randint(40, (800, 1), generator=g)
    for _ in range(20):
        choice = torch.randint(3, (800,), generator=g)
        last = sequence[:, -1]
        sequence = torch.cat([sequence, ((last + step[last, choice]) % 40).unsqueeze(1)], 1)
    inputs, targets = sequence[:, :-1], sequence[:, 1:]
    return Splits(
        train=TensorLoader(inputs[:640], targets[:640], batch_size=32, shuffle=True),
        val=TensorLoader(inputs[640:], targets[640:], batch_size=32),
    )
