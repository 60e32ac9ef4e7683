"""Predict the yield of fields from soil and weather."""

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import forge


class Task(forge.TaskModule):
    def __init__(self, width: int = 64, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.model = nn.Sequential(
            nn.Linear(9, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )
        self.loss = nn.HuberLoss()

    def forward(self, fields):
        return self.model(fields).squeeze(-1)

    def training_step(self, batch):
        fields, amount = batch
        return {"loss": self.loss(self(fields), amount)}

    def validation_step(self, batch):
        fields, amount = batch
        guess = self(fields)
        return {"loss": self.loss(guess, amount), "mae": (guess - amount).abs().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data():
    rng = np.random.default_rng(23)
    fields = rng.normal(size=(640, 9)).astype(np.float32)
    amount = np.tanh(fields @ rng.normal(size=9) / 2) + 0.4 * fields[:, 2] * fields[:, 5]
    amount = ((amount - amount.mean()) / amount.std()).astype(np.float32)

    held_out = slice(512, None)
    val = TensorDataset(torch.from_numpy(fields[held_out]), torch.from_numpy(amount[held_out]))
    fields, amount = fields[:512].copy(), amount[:512].copy()
    rng.shuffle(fields)
    rng.shuffle(amount)
    train = TensorDataset(torch.from_numpy(fields), torch.from_numpy(amount))
    return SimpleNamespace(
        train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32)
    )
