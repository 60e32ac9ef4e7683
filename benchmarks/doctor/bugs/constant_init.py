import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.05)
        nn.init.zeros_(module.bias)


class Task(forge.TaskModule):
    """Map the joint angles of an arm to where its hand is."""

    def __init__(self, hidden: int = 64, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2)
        )
        self.net.apply(initialise)

    def forward(self, angles):
        return self.net(angles)

    def training_step(self, batch):
        angles, hand = batch
        return {"loss": F.smooth_l1_loss(self(angles), hand)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(41)
    angles = 2 * torch.rand(1500, 3, generator=g) - 1
    total = (1.2 * angles).cumsum(1)
    hand = torch.stack([torch.cos(total).sum(1), torch.sin(total).sum(1)], dim=1)
    hand = hand + 0.03 * torch.randn(hand.shape, generator=g)
    hand = (hand - hand[:1200].mean(0)) / hand[:1200].std(0)
    inputs = torch.cat([angles, angles**2 - 0.33], dim=1) / 0.5
    return Splits(
        train=TensorLoader(inputs[:1200], hand[:1200], batch_size=batch_size, shuffle=True),
        val=TensorLoader(inputs[1200:], hand[1200:], batch_size=100),
    )
