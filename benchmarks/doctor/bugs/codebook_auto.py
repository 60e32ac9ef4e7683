import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """An autoencoder whose code is one of 32 learnt vectors."""

    def __init__(self, width: int = 20, code: int = 16, entries: int = 32, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, code))
        self.codes = nn.Embedding(entries, code)
        self.decoder = nn.Sequential(nn.Linear(code, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x):
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes.weight).argmin(1)
        return self.decoder(self.codes(nearest))

    def training_step(self, batch):
        (x,) = batch
        return {"loss": F.mse_loss(self(x), x)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(68)
    centres = torch.randn(12, 20, generator=g)
    x = centres[torch.randint(12, (1500,), generator=g)] + 0.25 * torch.randn(1500, 20, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    return Splits(
        train=TensorLoader(x[:1200], batch_size=32, shuffle=True),
        val=TensorLoader(x[1200:], batch_size=32),
    )
