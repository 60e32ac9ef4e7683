import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Predict which of four wines a chemical profile belongs to."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3, weight_decay: float = 1.0):
        super().__init__()
        self.lr = lr
        self.weight_decay = weight_decay
        self.net = nn.Sequential(
            nn.Linear(11, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4)
        )

    def forward(self, profile):
        return self.net(profile)

    def training_step(self, batch):
        profile, wine = batch
        logits = self(profile)
        return {"loss": F.cross_entropy(logits, wine), "accuracy": (logits.argmax(1) == wine).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)


def data(batch_size: int = 40) -> Splits:
    g = torch.Generator().manual_seed(4)
    profile = torch.randn(1500, 11, generator=g)
    mix = torch.relu(profile @ torch.randn(11, 24, generator=g) / 11**0.5) @ torch.randn(24, 4, generator=g)
    mix = mix - mix.mean(0)
    wine = (mix + 0.5 * torch.randn(1500, 4, generator=g)).argmax(1)
    return Splits(
        train=TensorLoader(profile[:1200], wine[:1200], batch_size=batch_size, shuffle=True),
        val=TensorLoader(profile[1200:], wine[1200:], batch_size=100),
    )
