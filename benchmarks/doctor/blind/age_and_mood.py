"""Two answers from one trunk: the age group and the mood intensity of a face descriptor."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, mood_weight=0.5):
        super().__init__()
        self.mood_weight = mood_weight
        self.trunk = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.age = nn.Linear(32, 4)
        self.mood = nn.Linear(32, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.age(h), self.mood(h).squeeze(1)

    def losses(self, batch):
        x, age, mood = batch
        age_logits, mood_guess = self(x)
        return F.cross_entropy(age_logits, age), F.mse_loss(mood_guess, mood)

    def training_step(self, batch):
        age_loss, mood_loss = self.losses(batch)
        logs = {"age_loss": age_loss.item(), "mood_loss": mood_loss.item()}
        logs["loss"] = age_loss + self.mood_weight * logs["mood_loss"]
        return logs

    def validation_step(self, batch):
        age_loss, mood_loss = self.losses(batch)
        return {"age_loss": age_loss, "mood_loss": mood_loss, "loss": age_loss + self.mood_weight * mood_loss}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def data():
    g = torch.Generator().manual_seed(7)
    age = torch.randint(4, (560,), generator=g)
    x = 1.3 * torch.randn(4, 20, generator=g)[age] + torch.randn(560, 20, generator=g)
    mood = x @ torch.randn(20, generator=g) / 20**0.5
    mood = (mood - mood.mean()) / mood.std()
    parts = [t[:448] for t in (x, age, mood)], [t[448:] for t in (x, age, mood)]
    return SimpleNamespace(
        train=DataLoader(TensorDataset(*parts[0]), batch_size=28, shuffle=True),
        val=DataLoader(TensorDataset(*parts[1]), batch_size=28),
    )
