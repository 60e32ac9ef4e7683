import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Classify sensor windows into five states of a pump."""

    def __init__(self, channels: int = 12, states: int = 5, lr: float = 3.0):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv1d(2, channels, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(channels, 2 * channels, 5, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Linear(8 * channels, states),
        )

    def forward(self, window):
        return self.net(window)

    def training_step(self, batch):
        window, state = batch
        logits = self(window)
        return {"loss": F.cross_entropy(logits, state), "accuracy": (logits.argmax(1) == state).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(18)
    state = torch.randint(5, (1000,), generator=g)
    pace = 0.4 + 0.25 * state.float().unsqueeze(1)
    phase = 6.28 * torch.rand(1000, 1, generator=g)
    time = torch.arange(40.0)
    first = torch.sin(pace * time + phase)
    second = torch.cos(0.5 * pace * time + phase)
    window = 0.5 * torch.stack([first, second], dim=1) + 0.8 * torch.randn(1000, 2, 40, generator=g)
    return Splits(
        train=TensorLoader(window[:800], state[:800], batch_size=batch_size, shuffle=True),
        val=TensorLoader(window[800:], state[800:], batch_size=100),
    )
