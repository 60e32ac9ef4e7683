import math

import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


def set_prior(net: nn.Module, prior: float) -> None:
    """Start with the biases at the log odds of a label."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, -math.log((1 - prior) / prior))


class Task(forge.TaskModule):
    """Multi-label tags of a piece of music from its spectrum."""

    def __init__(self, hidden: int = 96, tags: int = 6, prior: float = 0.01, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(24, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, tags)
        )
        set_prior(self.net, prior)

    def forward(self, spectrum):
        return self.net(spectrum)

    def training_step(self, batch):
        spectrum, tags = batch
        logits = self(spectrum)
        return {
            "loss": F.binary_cross_entropy_with_logits(logits, tags),
            "accuracy": ((logits > 0) == (tags > 0.5)).float().mean(),
        }

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(29)
    tags = (torch.rand(1500, 6, generator=g) < 0.3).float()
    patterns = torch.randn(6, 24, generator=g)
    spectrum = tags @ patterns + 1.2 * torch.randn(1500, 24, generator=g)
    spectrum = (spectrum - spectrum[:1200].mean(0)) / spectrum[:1200].std(0)
    return Splits(
        train=TensorLoader(spectrum[:1200], tags[:1200], batch_size=batch_size, shuffle=True),
        val=TensorLoader(spectrum[1200:], tags[1200:], batch_size=100),
    )
