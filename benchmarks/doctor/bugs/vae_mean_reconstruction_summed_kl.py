import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """A variational autoencoder of small pictures with one soft blob."""

    def __init__(self, latent: int = 6, hidden: int = 128, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(144, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 144))

    def forward(self, images):
        mean, log_var = self.encoder(images).chunk(2, dim=1)
        z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
        return self.decoder(z).view_as(images), mean, log_var

    def training_step(self, batch):
        images = batch[0]
        decoded, mean, log_var = self(images)
        reconstruction = F.mse_loss(decoded, images)
        kl = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
        return {"loss": reconstruction + kl, "reconstruction": reconstruction, "kl": kl}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(12)
    grid = torch.arange(12).float()
    centre = 2 + 8 * torch.rand(1000, 2, generator=g)
    width = 1.2 + torch.rand(1000, 1, 1, generator=g)
    rows = (grid.view(1, 12, 1) - centre[:, 0].view(-1, 1, 1)) ** 2
    columns = (grid.view(1, 1, 12) - centre[:, 1].view(-1, 1, 1)) ** 2
    images = torch.exp(-(rows + columns) / (2 * width**2)) + 0.05 * torch.randn(1000, 12, 12, generator=g)
    images = (images - images[:800].mean()) / images[:800].std()
    return Splits(
        train=TensorLoader(images[:800], batch_size=batch_size, shuffle=True),
        val=TensorLoader(images[800:], batch_size=100),
    )
