"""Time to failure of pumps, many of which still run when the study ends: an exponential survival model."""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    """The batch holds covariates, the observed time, and 1 where the pump was still running (censored)."""

    def __init__(self):
        super().__init__()
        self.log_hazard = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))

    def nll(self, batch):
        x, time, censored = batch
        log_hazard = self.log_hazard(x).squeeze(1)
        return -(censored * log_hazard - log_hazard.exp() * time).mean()

    def training_step(self, batch):
        return {"loss": self.nll(batch)}

    def validation_step(self, batch):
        x, time, censored = batch
        risk = self.log_hazard(x).squeeze(1)
        failed = censored == 0
        comparable = failed[:, None] & (time[:, None] < time[None])
        concordant = (risk[:, None] > risk[None]) & comparable
        return {"loss": self.nll(batch), "concordance": concordant.sum() / comparable.sum().clamp(min=1)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def data():
    g = torch.Generator().manual_seed(179)
    x = torch.randn(700, 6, generator=g)
    hazard = torch.exp(0.8 * x @ torch.randn(6, generator=g) / 2)
    failure = -torch.log(torch.rand(700, generator=g)) / hazard
    end = 0.2 + 1.0 * torch.rand(700, generator=g)
    censored = (failure > end).float()
    time = torch.minimum(failure, end)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:560], time[:560], censored[:560]), batch_size=28, shuffle=True),
        val=DataLoader(TensorDataset(x[560:], time[560:], censored[560:]), batch_size=140),
    )
