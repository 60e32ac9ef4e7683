import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, outputs)
    )


class Task(forge.TaskModule):
    """A generative adversarial network for points on a circle."""

    def __init__(self, noise: int = 4, lr: float = 2e-3):
        super().__init__()
        self.noise, self.lr = noise, lr
        self.generator, self.critic = mlp(noise, 2), mlp(2, 1)

    def sample(self, real):
        return self.generator(torch.randn(len(real), self.noise, device=real.device))

    def training_step(self, batch, name):
        (real,) = batch
        fake = self.sample(real)
        if name == "generator":
            return {"loss": F.softplus(-self.critic(fake)).mean()}
        return {"loss": F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()}

    def validation_step(self, batch):
        (real,) = batch
        return {"distance": torch.cdist(self.sample(real), real).min(1).values.mean()}

    def configure_optimizers(self):
        return {
            "critic": torch.optim.Adam(self.critic.parameters(), lr=self.lr, betas=(0.5, 0.9)),
            "generator": torch.optim.Adam(self.generator.parameters(), lr=self.lr, betas=(0.5, 0.9)),
        }


def data() -> Splits:
    g = torch.Generator().manual_seed(15)
    angle = 6.2832 * torch.rand(800, generator=g)
    points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(800, 2, generator=g)
    return Splits(
        train=TensorLoader(points[:640], batch_size=32, shuffle=True), val=TensorLoader(points[640:], batch_size=80)
    )
