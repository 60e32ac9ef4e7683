import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader

USERS, FILMS = 60, 40


class Task(forge.TaskModule):
    """How a user rates a film."""

    def __init__(self, width: int = 12, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.users, self.films = nn.Embedding(USERS, width), nn.Embedding(FILMS, width)
        self.user_bias, self.film_bias = nn.Embedding(USERS, 1), nn.Embedding(FILMS, 1)
        self.mlp = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, film):
        u, f = self.users(user), self.films(film)
        joint = self.mlp(torch.cat([u, f, u * f], dim=-1))
        return (joint + self.user_bias(user) + self.film_bias(film)).squeeze(-1)

    def training_step(self, batch):
        user, film, rating = batch
        return {"loss": F.mse_loss(self(user, film), rating)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(77)
    taste, style = torch.randn(USERS, 2, generator=g), torch.randn(FILMS, 2, generator=g)
    user, film = torch.randint(USERS, (2000,), generator=g), torch.randint(FILMS, (2000,), generator=g)
    rating = (taste[user] + style[film]).sum(1) / 2 + 0.2 * torch.randn(2000, generator=g)
    return Splits(
        train=TensorLoader(user[:1600], film[:1600], rating[:1600], batch_size=32, shuffle=True),
        val=TensorLoader(user[1600:], film[1600:], rating[1600:], batch_size=80),
    )
