import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Key of a tune."""

    def __init__(self, width: int = 32, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(24, width)
        self.norm1 = nn.LayerNorm(width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.out = nn.Linear(width, 6)

    def forward(self, notes):
        h, _ = self.gru(self.norm1(self.embed(notes)))
        return self.out(self.norm2(h[:, -1]))

    def training_step(self, batch):
        notes, y = batch
        logits = self(notes)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        plain = [p for p in self.parameters() if p.ndim >= 2]
        decayed = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 5.0}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(19)
    y = torch.randint(6, (1200,), generator=g)
    likely = torch.softmax(1.3 * torch.randn(6, 24, generator=g), 1)
    notes = torch.multinomial(likely[y], 14, replacement=True, generator=g)
    return Splits(
        train=TensorLoader(notes[:960], y[:960], batch_size=32, shuffle=True),
        val=TensorLoader(notes[960:], y[960:], batch_size=32),
    )
