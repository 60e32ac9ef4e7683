"""Semi-supervised learning: a slow moving average of the student gives targets for unlabelled points."""

import copy
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, decay: float = 0.95, weight: float = 1.0):
        super().__init__()
        self.decay, self.weight = decay, weight
        self.student = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def move_teacher(self):
        for old, new in zip(self.teacher.parameters(), self.student.parameters()):
            old.copy_((1 - self.decay) * old + self.decay * new)

    def training_step(self, batch):
        x, y, labelled = batch
        self.move_teacher()
        logits = self.student(x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            wanted = self.teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        supervised = F.cross_entropy(logits[labelled], y[labelled])
        consistency = F.mse_loss(logits.softmax(1), wanted)
        return {"loss": supervised + self.weight * consistency, "consistency": consistency.detach()}

    def validation_step(self, batch):
        x, y, _ = batch
        logits = self.teacher(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.student.parameters(), lr=5e-3)


def data():
    g = torch.Generator().manual_seed(41)
    y = torch.randint(3, (640,), generator=g)
    x = torch.randn(3, 10, generator=g)[y] + torch.randn(640, 10, generator=g)
    labelled = torch.arange(640) % 2 == 0
    labelled[512:] = True
    order = torch.randperm(512, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[order], y[order], labelled[order]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(x[512:], y[512:], labelled[512:]), batch_size=32),
    )
