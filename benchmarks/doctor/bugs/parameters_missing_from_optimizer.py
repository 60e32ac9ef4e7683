import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Predict how a user rates a film."""

    def __init__(self, users: int = 40, films: int = 30, width: int = 12, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.users = nn.Embedding(users, width)
        self.films = nn.Embedding(films, width)
        self.user_bias = nn.Embedding(users, 1)
        self.film_bias = nn.Embedding(films, 1)
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
        groups = [
            {"params": self.mlp.parameters(), "weight_decay": 1e-3},
            {"params": [*self.user_bias.parameters(), *self.film_bias.parameters()], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(77)
    taste = torch.randn(40, 2, generator=g)
    style = torch.randn(30, 2, generator=g)
    user = torch.randint(40, (2000,), generator=g)
    film = torch.randint(30, (2000,), generator=g)
    rating = (taste[user] * style[film]).sum(1) / 2**0.5 + 0.2 * torch.randn(2000, generator=g)
    return Splits(
        train=TensorLoader(user[:1600], film[:1600], rating[:1600], batch_size=batch_size, shuffle=True),
        val=TensorLoader(user[1600:], film[1600:], rating[1600:], batch_size=100),
    )
