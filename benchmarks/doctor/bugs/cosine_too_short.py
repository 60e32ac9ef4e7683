import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Recover a clean signal from a noisy one with a small autoencoder."""

    def __init__(self, length: int = 48, code: int = 8, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Linear(length, 64), nn.GELU(), nn.Linear(64, code))
        self.decoder = nn.Sequential(nn.Linear(code, 64), nn.GELU(), nn.Linear(64, length))

    def forward(self, noisy):
        return self.decoder(self.encoder(noisy))

    def training_step(self, batch):
        noisy, clean = batch
        return {"loss": F.mse_loss(self(noisy), clean)}

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2, eta_min=1e-6)
        return optimizer, schedule, "1 epoch"


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(55)
    time = torch.linspace(0, 6.28, 48)
    strength = torch.randn(1000, 3, generator=g)
    phase = 6.28 * torch.rand(1000, 3, 1, generator=g)
    waves = torch.sin(torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1) * time + phase)
    clean = (strength.unsqueeze(-1) * waves).sum(1) / 1.5
    noisy = clean + 0.4 * torch.randn(clean.shape, generator=g)
    train = TensorDataset(noisy[:800], clean[:800])
    val = TensorDataset(noisy[800:], clean[800:])
    return Splits(
        train=DataLoader(train, batch_size=batch_size, shuffle=True),
        val=DataLoader(val, batch_size=100),
    )
