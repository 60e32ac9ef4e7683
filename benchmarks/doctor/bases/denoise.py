import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """A clean signal from a noisy one, by a small autoencoder."""

    def __init__(self, length: int = 40, code: int = 12, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Linear(length, 64), nn.GELU(), nn.Linear(64, code), nn.GELU())
        self.decoder = nn.Sequential(nn.Linear(code, 64), nn.GELU(), nn.Linear(64, length))

    def forward(self, noisy):
        return self.decoder(self.encoder(noisy))

    def training_step(self, batch):
        (clean,) = batch
        noisy = clean + 0.4 * torch.randn_like(clean)
        return {"loss": F.mse_loss(self(noisy), clean)}

    def validation_step(self, batch):
        (clean,) = batch
        return {"loss": F.mse_loss(self(clean), clean)}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(55)
    phase = 6.28 * torch.rand(1000, 3, 1, generator=g)
    waves = torch.sin(torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1) * torch.linspace(0, 6.28, 40) + phase)
    clean = (torch.randn(1000, 3, 1, generator=g) * waves).sum(1)
    clean = clean / clean.std()
    return Splits(
        train=TensorLoader(clean[:800], batch_size=32, shuffle=True), val=TensorLoader(clean[800:], batch_size=50)
    )
