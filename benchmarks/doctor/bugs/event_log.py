import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Which of two events came first in a log."""

    def __init__(self, events: int = 16, width: int = 32, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(events, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 2)

    def forward(self, log):
        return self.out(self.encoder(self.embed(log)).mean(1))

    def training_step(self, batch):
        log, y = batch
        logits = self(log)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(91)
    n, length = 1200, 10
    log = torch.randint(2, 16, (n, length), generator=g)
    places = torch.rand(n, length, generator=g).argsort(1)
    log.scatter_(1, places[:, :1], 0)
    log.scatter_(1, places[:, 1:2], 1)
    y = (places[:, 0] > places[:, 1]).long()
    y = torch.where(torch.rand(n, generator=g) < 0.03, 1 - y, y)
    return Splits(
        train=TensorLoader(log[:960], y[:960], batch_size=32, shuffle=True),
        val=TensorLoader(log[960:], y[960:], batch_size=32),
    )
