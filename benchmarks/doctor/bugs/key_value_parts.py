import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class SelfAttention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.scale = width**-0.5

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(1, 2) * self.scale
        weights = torch.softmax(scores, dim=1)
        return weights @ self.value(x)


class Task(forge.TaskModule):
    """Copy the value of the part whose key equals the query part."""

    def __init__(self, width: int = 48, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.inp = nn.Linear(12, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.ModuleList(SelfAttention(width) for _ in range(2))
        self.out = nn.Linear(width, 4)

    def forward(self, parts):
        h = self.inp(parts)
        for norm, attention in zip(self.norms, self.attention, strict=True):
            h = h + attention(norm(h))
        return self.out(h[:, 0])

    def training_step(self, batch):
        parts, y = batch
        logits = self(parts)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(76)
    n, k = 1500, 6
    keys = F.normalize(torch.randn(n, k, 7, generator=g), dim=2) * 2
    values = torch.randint(4, (n, k), generator=g)
    wanted = torch.randint(k, (n, 1), generator=g)
    first = keys.gather(1, wanted.unsqueeze(-1).expand(n, 1, 7)) + 0.1 * torch.randn(n, 1, 7, generator=g)
    parts = torch.cat([keys, F.one_hot(values, 4).float(), torch.zeros(n, k, 1)], 2)
    query = torch.cat([first, torch.zeros(n, 1, 4), torch.ones(n, 1, 1)], 2)
    parts = torch.cat([query, parts], 1)
    y = values.gather(1, wanted).squeeze(1)
    dataset = TensorDataset(parts, y)
    train, val = random_split(dataset, [1200, len(dataset) - 1200], generator=torch.Generator().manual_seed(12))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
