import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Layer(nn.Module):
    """A gated convolution that sees nothing of what is to come."""

    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.past = 2 * dilation
        self.filter = nn.Conv1d(width, width, 3, dilation=dilation)
        self.gate = nn.Conv1d(width, width, 3, dilation=dilation)
        self.mix = nn.Conv1d(width, width, 1)

    def forward(self, x):
        padded = F.pad(x, (self.past, 0))
        return x + self.mix(torch.tanh(self.filter(padded)) * torch.sigmoid(self.gate(padded)))


class Task(forge.TaskModule):
    """Every value of a signal from the values before it."""

    def __init__(self, width: int = 16, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.inp = nn.Conv1d(1, width, 1)
        self.layers = nn.Sequential(*[Layer(width, d) for d in (1, 2, 4)])
        self.out = nn.Conv1d(width, 1, 1)

    def forward(self, signal):
        return self.out(F.relu(self.layers(self.inp(signal.unsqueeze(1))))).squeeze(1)

    def training_step(self, batch):
        (signal,) = batch
        return {"loss": F.mse_loss(self(signal[:, :-1]), signal[:, 1:])}

    def validation_step(self, batch):
        (signal,) = batch
        return {"loss": F.mse_loss(self(signal[:, :-1]), signal[:, 1:])}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(4)
    noise = torch.randn(600, 60, generator=g)
    signal = noise.clone()
    for t in range(2, 60):
        signal[:, t] = 1.3 * signal[:, t - 1] - 0.7 * signal[:, t - 2] + noise[:, t]
    signal = signal[:, 12:] / signal[:, 12:].std()
    return Splits(
        train=TensorLoader(signal[:480], batch_size=32, shuffle=True), val=TensorLoader(signal[480:], batch_size=40)
    )
