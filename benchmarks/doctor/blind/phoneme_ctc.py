"""Recognise phoneme strings in spoken frames with a small convolutional net and CTC; the last output of the net is the blank."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

PHONES = 6
BLANK = PHONES


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(10, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 32, 3, padding=1), nn.ReLU())
        self.out = nn.Linear(32, PHONES + 1)
        self.ctc = nn.CTCLoss(zero_infinity=True)

    def forward(self, frames):
        return self.out(self.conv(frames.transpose(1, 2)).transpose(1, 2)).log_softmax(-1)

    def loss(self, log_probs, phones):
        b, t, _ = log_probs.shape
        frames = torch.full((b,), t, dtype=torch.long)
        wanted = torch.full((b,), phones.shape[1], dtype=torch.long)
        return self.ctc(log_probs.transpose(0, 1), phones, frames, wanted)

    def training_step(self, batch):
        frames, phones = batch
        return {"loss": self.loss(self(frames), phones)}

    def validation_step(self, batch):
        frames, phones = batch
        log_probs = self(frames)
        right = 0
        for path, wanted in zip(log_probs.argmax(-1), phones):
            said = [int(p) for p in torch.unique_consecutive(path) if p != BLANK]
            right += said == wanted.tolist()
        return {"loss": self.loss(log_probs, phones), "exact": right / len(phones)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def data():
    g = torch.Generator().manual_seed(107)
    n, t, words = 400, 20, 4
    sounds = torch.randn(PHONES, 10, generator=g)
    phones = torch.randint(PHONES, (n, words), generator=g)
    frames = 0.3 * torch.randn(n, t, 10, generator=g)
    for i in range(n):
        for k in range(words):
            start = 5 * k + int(torch.randint(0, 2, (1,), generator=g))
            frames[i, start : start + 3] += sounds[phones[i, k]]
    return SimpleNamespace(
        train=DataLoader(TensorDataset(frames[:320], phones[:320]), batch_size=16, shuffle=True),
        val=DataLoader(TensorDataset(frames[320:], phones[320:]), batch_size=16),
    )
