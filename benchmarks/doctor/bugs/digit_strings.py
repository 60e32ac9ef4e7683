import math

import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PositionalEncoding(nn.Module):
    def __init__(self, width: int, longest: int = 200):
        super().__init__()
        position = torch.arange(longest).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(longest, 1, width)
        table[:, 0, 0::2] = torch.sin(position * rate)
        table[:, 0, 1::2] = torch.cos(position * rate)
        self.register_buffer("table", table)

    def forward(self, x):
        return x + self.table[: x.size(0)]


class Task(forge.TaskModule):
    """A class that follows from the first digit and from whether the last one is large."""

    def __init__(self, width: int = 32, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(10, width)
        self.position = PositionalEncoding(width)
        layer = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 5)

    def forward(self, digits):
        return self.out(self.encoder(self.position(self.embed(digits))).mean(1))

    def training_step(self, batch):
        digits, y = batch
        logits = self(digits)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(65)
    digits = torch.randint(10, (1500, 8), generator=g)
    y = (digits[:, 0] // 2 + (digits[:, -1] > 6).long()) % 5
    train = TensorDataset(digits[:1200], y[:1200])
    val = TensorDataset(digits[1200:], y[1200:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
