import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Code(nn.Module):
    """A bit for each number; the gradient passes straight through."""

    def forward(self, h):
        soft = torch.tanh(h)
        hard = torch.where(soft > 0, 1.0, -1.0)
        return soft + (hard - soft).detach()


class Task(forge.TaskModule):
    """An autoencoder with a code of sixteen bits."""

    def __init__(self, features: int = 24, bits: int = 16, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, bits))
        self.code = Code()
        self.decoder = nn.Sequential(nn.Linear(bits, 64), nn.ReLU(), nn.Linear(64, features))

    def forward(self, x):
        return self.decoder(self.code(self.encoder(x)))

    def training_step(self, batch):
        (x,) = batch
        return {"loss": F.mse_loss(self(x), x)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(42)
    x = torch.tanh(torch.randn(1400, 5, generator=g) @ torch.randn(5, 24, generator=g))
    x = x + 0.2 * torch.randn(1400, 24, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    return Splits(train=TensorLoader(x[:1120], batch_size=32, shuffle=True), val=TensorLoader(x[1120:], batch_size=56))
