"""Matrix factorisation: ratings of movies by users."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, users=60, movies=40, factors=32):
        super().__init__()
        self.user = nn.Embedding(users, factors)
        self.movie = nn.Embedding(movies, factors)
        nn.init.normal_(self.user.weight, std=0.3)
        nn.init.normal_(self.movie.weight, std=0.3)
        self.average = nn.Parameter(torch.zeros(()))
        self.criterion = nn.MSELoss()

    def forward(self, u, m):
        return (self.user(u) * self.movie(m)).sum(0) + self.average

    def training_step(self, batch):
        u, m, rating = batch
        return {"loss": self.criterion(self(u, m), rating)}

    def validation_step(self, batch):
        u, m, rating = batch
        return {"rmse": self.criterion(self(u, m), rating).sqrt()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=1e-5)


def data():
    g = torch.Generator().manual_seed(17)
    p, q = torch.randn(60, 3, generator=g), torch.randn(40, 3, generator=g)
    pairs = torch.cartesian_prod(torch.arange(60), torch.arange(40))[torch.randperm(2400, generator=g)]
    u, m = pairs.T
    rating = 3.0 + (p[u] * q[m]).sum(1) / 3**0.5 + 0.1 * torch.randn(2400, generator=g)
    cut = 1920
    return SimpleNamespace(
        train=DataLoader(TensorDataset(u[:cut], m[:cut], rating[:cut]), 32, shuffle=True, drop_last=True),
        val=DataLoader(TensorDataset(u[cut:], m[cut:], rating[cut:]), 32),
    )
