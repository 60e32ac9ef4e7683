"""A Wasserstein GAN with gradient penalty for points on two half moons."""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import forge


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, o))


class Task(forge.TaskModule):
    def __init__(self, noise=4, penalty=2.0):
        super().__init__()
        self.noise, self.penalty = noise, penalty
        self.generator = mlp(noise, 2)
        self.critic = mlp(2, 1)

    def sample(self, count, like):
        return self.generator(torch.randn(count, self.noise).to(like))

    def gradient_penalty(self, real, fake):
        mix = torch.rand(len(real), 1).to(real)
        between = (mix * real + (1 - mix) * fake).requires_grad_(True)
        score = self.critic(between)
        (slope,) = torch.autograd.grad(score.sum(), between)
        return ((slope.norm(dim=1) - 1) ** 2).mean()

    def training_step(self, batch, name):
        (real,) = batch
        if name == "critic":
            fake = self.sample(len(real), real).detach()
            distance = self.critic(real).mean() - self.critic(fake).mean()
            gp = self.gradient_penalty(real, fake)
            return {"loss": -distance + self.penalty * gp, "distance": distance.detach(), "gp": gp.detach()}
        return {"loss": -self.critic(self.sample(len(real), real)).mean()}

    def validation_step(self, batch):
        (real,) = batch
        fake = self.sample(len(real), real)
        return {"nearest": torch.cdist(fake, real).min(1).values.mean()}

    def configure_optimizers(self):
        return {
            "critic": torch.optim.Adam(self.critic.parameters(), lr=3e-3, betas=(0.5, 0.9)),
            "generator": torch.optim.Adam(self.generator.parameters(), lr=3e-3, betas=(0.5, 0.9)),
        }


def data():
    g = torch.Generator().manual_seed(193)
    angle = torch.pi * torch.rand(700, generator=g)
    upper = torch.rand(700, generator=g) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x - 0.5, y - 0.25], 1) + 0.05 * torch.randn(700, 2, generator=g)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(points[:560]), batch_size=28, shuffle=True),
        val=DataLoader(TensorDataset(points[560:]), batch_size=70),
    )
