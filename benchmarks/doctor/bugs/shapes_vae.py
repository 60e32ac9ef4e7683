import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class VAE(nn.Module):
    def __init__(self, pixels: int, hidden: int, latent: int):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.log_var = nn.Linear(hidden, latent)
        self.decode = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def forward(self, x):
        h = self.encode(x.flatten(1))
        mu, log_var = self.mu(h), self.log_var(h)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp() if self.training else mu
        return self.decode(z).view_as(x), mu, log_var


class Task(forge.TaskModule):
    def __init__(self, hidden: int = 96, latent: int = 6, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.vae = VAE(144, hidden, latent)

    def forward(self, x):
        return self.vae(x)[0]

    def training_step(self, batch):
        (x,) = batch
        logits, mu, log_var = self.vae(x)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x)
        kl = -0.5 * torch.sum(1 + log_var - mu.square() - log_var.exp())
        return {"loss": reconstruction + kl, "reconstruction": reconstruction, "kl": kl}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(13)
    n = 1200
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    cx, cy = (3 + 5 * torch.rand(n, 1, 1, generator=g) for _ in range(2))
    rx, ry = (1.5 + 2 * torch.rand(n, 1, 1, generator=g) for _ in range(2))
    inside = ((xx - cx) / rx).square() + ((yy - cy) / ry).square() < 1
    flips = torch.rand(n, 12, 12, generator=g) < 0.02
    x = (inside ^ flips).float()
    dataset = TensorDataset(x)
    train, val = random_split(dataset, [960, len(dataset) - 960], generator=torch.Generator().manual_seed(34))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
