import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


def length_mask(lengths, size: int):
    return torch.arange(size, device=lengths.device) >= lengths.unsqueeze(1)


class Task(forge.TaskModule):
    """Label every beat of a piece with one of six chords."""

    def __init__(self, width: int = 32, chords: int = 6, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.inp = nn.Linear(12, width)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, chords)

    def forward(self, x):
        return self.out(self.rnn(F.relu(self.inp(x)))[0])

    def training_step(self, batch):
        x, chords, lengths = batch
        logits = self(x)
        mask = length_mask(lengths, x.shape[1])
        losses = F.cross_entropy(logits.transpose(1, 2), chords, reduction="none")
        loss = (losses * mask).sum() / mask.sum().clamp(min=1)
        return {"loss": loss, "accuracy": ((logits.argmax(-1) == chords) * mask).sum() / mask.sum().clamp(min=1)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(71)
    n, beats = 700, 20
    change = torch.rand(n, beats, generator=g) < 0.3
    jump = torch.randint(1, 6, (n, beats), generator=g) * change
    chords = (torch.randint(6, (n, 1), generator=g) + jump.cumsum(1)) % 6
    profile = torch.randn(6, 12, generator=g)
    lengths = torch.randint(8, beats, (n,), generator=g)
    real = torch.arange(beats) < lengths.unsqueeze(1)
    x = (profile[chords] + 1.2 * torch.randn(n, beats, 12, generator=g)) * real.unsqueeze(-1)
    chords = chords * real
    return Splits(
        train=TensorLoader(x[:560], chords[:560], lengths[:560], batch_size=32, shuffle=True),
        val=TensorLoader(x[560:], chords[560:], lengths[560:], batch_size=32),
    )
