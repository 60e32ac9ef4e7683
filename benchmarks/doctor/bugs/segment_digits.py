import forge
import torch
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Seven-segment digits with noise, flattened."""

    def __init__(self, hidden: int = 64, confidence: float = 0.9, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(63, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )
        self.criterion = nn.CrossEntropyLoss(label_smoothing=confidence)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": self.criterion(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


LIT = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"]
PLACES = {
    "a": (slice(0, 1), slice(1, 6)),
    "b": (slice(1, 4), slice(6, 7)),
    "c": (slice(5, 8), slice(6, 7)),
    "d": (slice(8, 9), slice(1, 6)),
    "e": (slice(5, 8), slice(0, 1)),
    "f": (slice(1, 4), slice(0, 1)),
    "g": (slice(4, 5), slice(1, 6)),
}


def data() -> Splits:
    g = torch.Generator().manual_seed(57)
    digits = torch.zeros(10, 9, 7)
    for k, lit in enumerate(LIT):
        for name in lit:
            digits[k][PLACES[name]] = 1.0
    y = torch.randint(10, (1200,), generator=g)
    x = digits[y] + 0.7 * torch.randn(1200, 9, 7, generator=g)
    x = (x - x.mean()) / x.std()
    return Splits(
        train=TensorLoader(x[:960], y[:960], batch_size=32, shuffle=True),
        val=TensorLoader(x[960:], y[960:], batch_size=32),
    )
