import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """Choose one of four stories for a reader: an actor learns from its rewards, a critic what to expect."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.actor = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        self.critic = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch):
        reader, rewards = batch
        choice = torch.distributions.Categorical(logits=self.actor(reader))
        story = choice.sample()
        reward = rewards.gather(1, story[:, None]).squeeze(1)
        value = self.critic(reader).squeeze(1)
        advantage = (reward - value).detach()
        actor_loss = -(choice.log_prob(story) * advantage).mean()
        loss = actor_loss + 0.5 * F.mse_loss(value, reward) - 0.01 * choice.entropy().mean()
        return {"loss": loss, "reward": reward.mean()}

    def validation_step(self, batch):
        reader, rewards = batch
        return {"reward": (self.actor(reader).softmax(1) * rewards).sum(1).mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(61)
    reader = torch.randn(800, 8, generator=g)
    rewards = torch.tanh(reader @ torch.randn(8, 4, generator=g) / 2) + 0.1 * torch.randn(800, 4, generator=g)
    return Splits(
        train=TensorLoader(reader[:640], rewards[:640], batch_size=32, shuffle=True),
        val=TensorLoader(reader[640:], rewards[640:], batch_size=40),
    )
