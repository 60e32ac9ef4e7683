"""Remember the first symbol of a noisy sequence and say it at the end, with a hand-written recurrent net."""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, hidden: int = 40):
        super().__init__()
        self.hidden = hidden
        self.embed = nn.Embedding(8, 16)
        self.cell = nn.GRUCell(16, hidden)
        self.readout = nn.Linear(hidden, 8)

    def forward(self, symbols):
        h = symbols.new_zeros(len(symbols), self.hidden, dtype=torch.float)
        for x in self.embed(symbols).unbind(1):
            h = self.cell(x, h.detach())
        return self.readout(h)

    def training_step(self, batch):
        symbols, first = batch
        logits = self(symbols)
        return {"loss": F.cross_entropy(logits, first), "accuracy": (logits.argmax(1) == first).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def data():
    g = torch.Generator().manual_seed(22)
    symbols = torch.randint(8, (800, 7), generator=g)
    first = symbols[:, 0].clone()
    return SimpleNamespace(
        train=DataLoader(TensorDataset(symbols[:640], first[:640]), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(symbols[640:], first[640:]), batch_size=32),
    )
