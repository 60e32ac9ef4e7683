"""Classify star spectra; each training sample gets fresh sensor noise."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import forge


class Spectra(Dataset):
    def __init__(self, spectra, labels, noise=0.0):
        self.spectra, self.labels, self.noise = spectra, labels, noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        spectrum = self.spectra[i]
        if self.noise:
            spectrum += self.noise * torch.randn(len(spectrum))
        return spectrum, self.labels[i]


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 40)), nn.Conv1d(1, 8, 7, padding=3), nn.ReLU(), nn.AvgPool1d(4),
            nn.Flatten(), nn.Linear(80, 48), nn.ReLU(), nn.Linear(48, 5),
        )

    def forward(self, spectrum):
        return self.net(spectrum)

    def training_step(self, batch):
        spectrum, kind = batch
        logits = self(spectrum)
        return {"loss": F.cross_entropy(logits, kind), "accuracy": (logits.argmax(1) == kind).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def data():
    g = torch.Generator().manual_seed(37)
    kind = torch.randint(5, (500,), generator=g)
    shapes = torch.cumsum(torch.randn(5, 40, generator=g), 1)
    shapes = (shapes - shapes.mean(1, keepdim=True)) / shapes.std(1, keepdim=True)
    spectra = shapes[kind] + 0.5 * torch.randn(500, 40, generator=g)
    return SimpleNamespace(
        train=DataLoader(Spectra(spectra[:400], kind[:400], noise=0.5), batch_size=20, shuffle=True),
        val=DataLoader(Spectra(spectra[400:], kind[400:]), batch_size=20),
    )
