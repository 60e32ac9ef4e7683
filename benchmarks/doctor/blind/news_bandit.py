"""A contextual bandit: a policy picks one of five stories for a reader, trained with REINFORCE and a baseline."""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, lr=5e-3):
        super().__init__()
        self.lr = lr
        self.policy = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 5))
        self.register_buffer("baseline", torch.zeros(()))

    def forward(self, reader):
        return Categorical(logits=self.policy(reader))

    def training_step(self, batch):
        reader, clicks = batch
        choice = self(reader)
        story = choice.sample()
        reward = clicks.gather(1, story[:, None]).squeeze(1)
        advantage = reward - self.baseline
        self.baseline.lerp_(reward.mean(), 0.05)
        loss = (choice.log_prob(story) * advantage).mean()
        return {"loss": loss, "reward": reward.mean()}

    def validation_step(self, batch):
        reader, clicks = batch
        story = self(reader).probs.argmax(1)
        return {"reward": clicks.gather(1, story[:, None]).mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data():
    g = torch.Generator().manual_seed(55)
    reader = torch.randn(800, 12, generator=g)
    taste = torch.randn(12, 5, generator=g)
    chance = torch.softmax(reader @ taste, 1)
    clicks = (torch.rand(800, 5, generator=g) < chance * 1.2).float()
    return SimpleNamespace(
        train=DataLoader(TensorDataset(reader[:640], clicks[:640]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(reader[640:], clicks[640:]), batch_size=32),
    )
