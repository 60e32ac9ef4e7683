import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """A variational autoencoder of pictures of a bright disc; the loss is the negative ELBO per picture."""

    def __init__(self, beta: float = 1.0, lr: float = 2e-3):
        super().__init__()
        self.beta, self.lr = beta, lr
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 144), nn.Unflatten(1, (12, 12)))

    def forward(self, images):
        return self.decoder(self.encoder(images).chunk(2, 1)[0]).sigmoid()

    def training_step(self, batch):
        (images,) = batch
        mean, log_var = self.encoder(images).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_var).exp() if self.training else mean
        decoded = self.decoder(code)
        rebuilt = F.binary_cross_entropy_with_logits(decoded, images, reduction="sum") / len(images)
        kl = -0.5 * torch.sum(1 + log_var - mean.square() - log_var.exp()) / len(images)
        return {"loss": rebuilt + self.beta * kl, "rebuilt": rebuilt, "kl": kl}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(1)
    ys, xs = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    centre = 3 + 5 * torch.rand(600, 2, 1, 1, generator=g)
    radius = 1.5 + 2 * torch.rand(600, 1, 1, generator=g)
    images = torch.sigmoid(2 * (radius - ((xs - centre[:, 0]) ** 2 + (ys - centre[:, 1]) ** 2).sqrt()))
    return Splits(
        train=TensorLoader(images[:480], batch_size=24, shuffle=True), val=TensorLoader(images[480:], batch_size=24)
    )
