import math

import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Task(forge.TaskModule):
    """A generative adversarial network for points on eight spots of a circle."""

    def __init__(self, noise: int = 8, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.noise = noise
        self.generator = nn.Sequential(
            nn.Linear(noise, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(2, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1)
        )

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch, name):
        (real,) = batch
        fake = self.generator(torch.randn(len(real), self.noise, device=real.device))
        if name == "critic":
            score = self.critic(torch.cat([real, fake.detach()])).squeeze(1)
            label = torch.cat([torch.ones(len(real)), torch.zeros(len(real))]).to(real.device)
            return F.binary_cross_entropy_with_logits(score, label)
        score = self.critic(fake.detach()).squeeze(1)
        spread = (fake.std(0) - real.std(0)).square().mean()
        return F.binary_cross_entropy_with_logits(score, torch.ones_like(score)) + 0.01 * spread

    def validation_step(self, batch):
        (real,) = batch
        fake = self.generator(torch.randn(len(real), self.noise, device=real.device))
        return {"distance": torch.cdist(fake, real).min(1).values.mean()}

    def configure_optimizers(self):
        return {
            "critic": torch.optim.Adam(self.critic.parameters(), lr=self.lr, betas=(0.5, 0.999)),
            "generator": torch.optim.Adam(self.generator.parameters(), lr=self.lr, betas=(0.5, 0.999)),
        }


def data() -> Splits:
    g = torch.Generator().manual_seed(15)
    spot = torch.randint(8, (1600,), generator=g) * (2 * math.pi / 8)
    points = 1.5 * torch.stack([spot.cos(), spot.sin()], 1) + 0.08 * torch.randn(1600, 2, generator=g)
    dataset = TensorDataset(points)
    train, val = random_split(dataset, [1280, len(dataset) - 1280], generator=torch.Generator().manual_seed(9))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
