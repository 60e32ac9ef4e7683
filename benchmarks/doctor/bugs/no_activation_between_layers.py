import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Decide whether two switches and four gauges put a plant into alarm."""

    def __init__(self, hidden: int = 64, dropout: float = 0.1, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(6, hidden),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.Dropout(dropout),
            nn.Linear(hidden, 1),
        )

    def forward(self, state):
        return self.net(state).squeeze(1)

    def training_step(self, batch):
        state, alarm = batch
        logits = self(state)
        loss = F.binary_cross_entropy_with_logits(logits, alarm)
        return {"loss": loss, "accuracy": ((logits > 0) == (alarm > 0.5)).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(44)
    state = torch.randn(1500, 6, generator=g)
    level = state[:, 0] * state[:, 1] + 0.6 * state[:, 2] * state[:, 3] + 0.2 * torch.randn(1500, generator=g)
    alarm = (level > 0).float()
    return Splits(
        train=TensorLoader(state[:1200], alarm[:1200], batch_size=batch_size, shuffle=True),
        val=TensorLoader(state[1200:], alarm[1200:], batch_size=100),
    )
