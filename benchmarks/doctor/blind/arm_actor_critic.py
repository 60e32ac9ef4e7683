"""One-step actor-critic for a robot arm that has to reach an angle: a Gaussian policy and a value network."""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.tensor(-0.5))
        self.critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

    def reward(self, angle, goal):
        return -(angle - goal).square()

    def training_step(self, batch):
        state, goal = batch
        policy = Normal(self.actor(state).squeeze(1), self.log_std.exp())
        angle = policy.sample()
        reward = self.reward(angle, goal)
        value = self.critic(state).squeeze(1)
        advantage = reward - value
        actor_loss = -(policy.log_prob(angle) * advantage).mean()
        critic_loss = (reward - value).square().mean()
        loss = actor_loss + 0.5 * critic_loss - 1e-3 * policy.entropy().mean()
        return {"loss": loss, "reward": reward.mean(), "critic_loss": critic_loss.detach()}

    def validation_step(self, batch):
        state, goal = batch
        angle = self.actor(state).squeeze(1)
        value = self.critic(state).squeeze(1)
        reward = self.reward(angle, goal)
        return {"reward": reward.mean(), "value_error": (reward - value).abs().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def data():
    g = torch.Generator().manual_seed(61)
    state = torch.randn(900, 6, generator=g)
    goal = torch.tanh(state @ torch.randn(6, generator=g) / 2)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(state[:720], goal[:720]), batch_size=24, shuffle=True),
        val=DataLoader(TensorDataset(state[720:], goal[720:]), batch_size=24),
    )
