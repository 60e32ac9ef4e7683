import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Tag a text, given as word counts, with any of eight topics."""

    def __init__(self, words: int = 60, topics: int = 8, hidden: int = 64, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(words, hidden), nn.Tanh(), nn.Linear(hidden, topics))

    def forward(self, counts):
        return self.net(counts)

    def training_step(self, batch):
        counts, topics = batch
        logits = self(counts)
        loss = F.binary_cross_entropy_with_logits(logits, topics, reduction="sum")
        return {"loss": loss, "hits": ((logits > 0) == (topics > 0.5)).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def data(batch_size: int = 64) -> Splits:
    g = torch.Generator().manual_seed(8)
    topics = (torch.rand(1600, 8, generator=g) < 0.3).float()
    rates = torch.rand(8, 60, generator=g) ** 3
    counts = torch.poisson(0.3 + 2 * topics @ rates, generator=g).log1p()
    counts = (counts - counts[:1280].mean(0)) / counts[:1280].std(0)
    return Splits(
        train=TensorLoader(counts[:1280], topics[:1280], batch_size=batch_size, shuffle=True),
        val=TensorLoader(counts[1280:], topics[1280:], batch_size=64),
    )
