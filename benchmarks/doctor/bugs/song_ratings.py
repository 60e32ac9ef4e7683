import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Rating of a song by a listener."""

    def __init__(self, listeners: int = 40, buckets: int = 8, width: int = 16, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.buckets = buckets
        self.listener = nn.Embedding(listeners, width)
        self.song = nn.Embedding(buckets, width)
        self.net = nn.Sequential(nn.Linear(3 * width, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, listener, song):
        a, b = self.listener(listener), self.song(song % self.buckets)
        return self.net(torch.cat([a, b, a * b], 1)).squeeze(1)

    def training_step(self, batch):
        listener, song, rating = batch
        return {"loss": F.mse_loss(self(listener, song), rating)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(60)
    n = 2000
    listener = torch.randint(40, (n,), generator=g)
    song = (400 * torch.rand(n, generator=g) ** 2).long()
    quality, mood = torch.randn(400, generator=g), torch.randn(40, generator=g)
    rating = quality[song] + 0.5 * mood[listener] + 0.2 * torch.randn(n, generator=g)
    rating = (rating - rating.mean()) / rating.std()
    return Splits(
        train=TensorLoader(listener[:1600], song[:1600], rating[:1600], batch_size=64, shuffle=True),
        val=TensorLoader(listener[1600:], song[1600:], rating[1600:], batch_size=64),
    )
