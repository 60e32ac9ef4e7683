"""Domain-adversarial training: labelled source data, unlabelled target data, gradient reversal between them."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.strength * grad, None


class Task(forge.TaskModule):
    def __init__(self, strength=0.5):
        super().__init__()
        self.strength = strength
        self.features = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.label = nn.Linear(16, 3)
        self.domain = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch):
        source, y, target = batch
        h_source, h_target = self.features(source), self.features(target)
        label_loss = F.cross_entropy(self.label(h_source), y)
        h = Reverse.apply(torch.cat([h_source, h_target]), self.strength)
        logit = self.domain(h).squeeze(1)
        which = torch.cat([torch.zeros(len(source)), torch.ones(len(target))]).to(logit)
        domain_loss = F.binary_cross_entropy_with_logits(logit, which)
        return {
            "loss": label_loss + domain_loss,
            "label_loss": label_loss.detach(),
            "domain_accuracy": ((logit > 0) == (which > 0)).float().mean(),
        }

    def validation_step(self, batch):
        target, y = batch
        logits = self.label(self.features(target))
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def data():
    g = torch.Generator().manual_seed(97)
    centres = torch.randn(3, 12, generator=g)
    shift = torch.zeros(12)
    shift[::2] = 2.0

    def draw(n, move):
        y = torch.randint(3, (n,), generator=g)
        return centres[y] + 0.8 * torch.randn(n, 12, generator=g) + move * shift, y

    source, y = draw(480, 0)
    target, _ = draw(480, 1)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(source, y, target), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(*draw(120, 1)), batch_size=24),
    )
