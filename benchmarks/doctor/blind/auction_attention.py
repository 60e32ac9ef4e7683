"""For each bidder in an auction predict the price of the bidder it follows, with hand-written attention."""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import forge


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return torch.softmax(scores, dim=1) @ self.v(x)


class Task(forge.TaskModule):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Linear(17, dim)
        self.layers = nn.ModuleList(Attention(dim) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.out = nn.Linear(dim, 1)

    def forward(self, bidders):
        h = self.embed(bidders)
        for attention, norm in zip(self.layers, self.norms):
            h = norm(h + attention(h))
        return self.out(h).squeeze(-1)

    def training_step(self, batch):
        bidders, price = batch
        return {"loss": (self(bidders) - price).square().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def data():
    g = torch.Generator().manual_seed(53)
    n, size = 800, 8
    own = torch.stack([torch.randperm(size, generator=g) for _ in range(n)])
    follows = torch.zeros(n, size, dtype=torch.long)
    leader = torch.randint(size, (n, 2), generator=g)
    pick = torch.randint(2, (n, size), generator=g)
    follows = leader.gather(1, pick)
    price = torch.randn(n, size, generator=g)
    where = own.argsort(1)
    wanted = price.gather(1, where.gather(1, follows))
    eye = torch.eye(size)
    bidders = torch.cat([eye[own], eye[follows], price[..., None]], -1)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(bidders[:640], wanted[:640]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(bidders[640:], wanted[640:]), batch_size=32),
    )
