import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Find out whether a short signal contains a pulse."""

    def __init__(self, channels: int = 16, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.convs = nn.Sequential(
            nn.Conv1d(1, channels, 7, padding=3),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 7, padding=3),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
            nn.AdaptiveMaxPool1d(1),
            nn.Flatten(),
        )
        self.score = nn.Linear(channels, 1)

    def forward(self, signal):
        return self.score(self.convs(signal)).squeeze(-1)

    def training_step(self, batch):
        signal, has_pulse = batch
        score = self(signal)
        loss = F.soft_margin_loss(score, has_pulse.float())
        return {"loss": loss, "accuracy": ((score > 0).long() == has_pulse).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(3)
    has_pulse = torch.randint(2, (1200,), generator=g)
    centre = torch.randint(8, 56, (1200, 1), generator=g)
    time = torch.arange(64).expand(1200, 64)
    pulse = 2.5 * torch.exp(-(((time - centre) / 3.0) ** 2)) * torch.cos((time - centre) / 1.5)
    signal = torch.randn(1200, 64, generator=g) + has_pulse.unsqueeze(1) * pulse
    signal = signal.unsqueeze(1)
    return Splits(
        train=TensorLoader(signal[:960], has_pulse[:960], batch_size=batch_size, shuffle=True),
        val=TensorLoader(signal[960:], has_pulse[960:], batch_size=80),
    )
