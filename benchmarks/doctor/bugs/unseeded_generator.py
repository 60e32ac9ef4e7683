import forge
import numpy as np
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Beats(Dataset):
    """Heart beats; those for training are shifted and scaled at random."""

    def __init__(self, signals: np.ndarray, labels: np.ndarray, augment: bool):
        self.signals = signals
        self.labels = labels
        self.augment = augment
        self.rng = np.random.default_rng()

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        signal = self.signals[index]
        if self.augment:
            signal = np.roll(signal, self.rng.integers(-3, 4)) * self.rng.uniform(0.8, 1.2)
        return torch.from_numpy(signal.astype(np.float32)).unsqueeze(0), int(self.labels[index])


class Task(forge.TaskModule):
    """Classify single heart beats."""

    def __init__(self, width: int = 16, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv1d(1, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(width, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(width * 20, 4),
        )

    def forward(self, beat):
        return self.net(beat)

    def training_step(self, batch):
        beat, label = batch
        logits = self(beat)
        return {"loss": F.cross_entropy(logits, label), "accuracy": (logits.argmax(1) == label).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    rng = np.random.default_rng(16)
    labels = rng.integers(4, size=1000)
    time = np.linspace(-1, 1, 40)
    widths = np.array([0.1, 0.2, 0.2, 0.35])[labels, None]
    bumps = np.array([0.0, 0.0, 0.8, 0.4])[labels, None]
    signals = np.exp(-((time / widths) ** 2)) - bumps * np.exp(-(((time - 0.5) / 0.15) ** 2))
    signals = signals / 0.7 - 0.3 + 0.8 * rng.normal(size=signals.shape)
    return Splits(
        train=DataLoader(Beats(signals[:800], labels[:800], augment=True), batch_size=batch_size, shuffle=True),
        val=DataLoader(Beats(signals[800:], labels[800:], augment=False), batch_size=50),
    )
