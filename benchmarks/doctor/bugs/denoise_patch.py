import forge
import numpy as np
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Clean patches and a noisy copy of each."""

    def __init__(self, clean, sigma: float = 0.6):
        self.clean = clean
        self.sigma = sigma

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        rng = np.random.default_rng(1234)
        noise = torch.from_numpy(rng.normal(size=self.clean[i].shape).astype(np.float32))
        return self.clean[i] + self.sigma * noise, self.clean[i]


class Task(forge.TaskModule):
    def __init__(self, width: int = 16, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 1, 3, padding=1),
        )

    def forward(self, x):
        return x - self.net(x)

    def training_step(self, batch):
        noisy, clean = batch
        return {"loss": F.mse_loss(self(noisy), clean)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(79)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij")
    angle = 6.28 * torch.rand(500, 1, 1, generator=g)
    offset = 0.6 * torch.randn(500, 1, 1, generator=g)
    clean = torch.sign(xx * angle.cos() + yy * angle.sin() + 0.5 * offset) * (0.5 + torch.rand(500, 1, 1, generator=g))
    clean = clean.unsqueeze(1)
    return Splits(
        train=DataLoader(Noisy(clean[:400]), batch_size=32, shuffle=True),
        val=DataLoader(Noisy(clean[400:]), batch_size=50),
    )
