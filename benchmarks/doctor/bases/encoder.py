import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader

PAD, LENGTH = 0, 12


class Task(forge.TaskModule):
    """Which of two events came first in a log."""

    def __init__(self, events: int = 16, width: int = 32, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(events, width, padding_idx=PAD)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 2)

    def forward(self, log):
        real = log != PAD
        h = self.embed(log) + self.place
        h = self.encoder(h, src_key_padding_mask=~real)
        return self.out((h * real.unsqueeze(2)).sum(1) / real.sum(1, keepdim=True))

    def training_step(self, batch):
        log, y = batch
        logits = self(log)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(91)
    log = torch.randint(3, 16, (1200, LENGTH), generator=g)
    places = torch.rand(1200, 8, generator=g).argsort(1)
    log.scatter_(1, places[:, :1], 1)
    log.scatter_(1, places[:, 1:2], 2)
    y = (places[:, 0] > places[:, 1]).long()
    log = log.masked_fill(torch.arange(LENGTH) >= torch.randint(8, LENGTH + 1, (1200, 1), generator=g), PAD)
    return Splits(
        train=TensorLoader(log[:960], y[:960], batch_size=32, shuffle=True),
        val=TensorLoader(log[960:], y[960:], batch_size=60),
    )
