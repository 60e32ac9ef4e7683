import torch
from torch import nn

import forge
from forge.data import Splits, TensorLoader

PHONES = 6
BLANK = PHONES


class Task(forge.TaskModule):
    """The phonemes in spoken frames; the last output is the blank."""

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.conv = nn.Sequential(nn.Conv1d(10, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, PHONES + 1, 1))
        self.ctc = nn.CTCLoss(blank=BLANK, zero_infinity=True)

    def forward(self, frames):
        return self.conv(frames.transpose(1, 2)).permute(2, 0, 1).log_softmax(-1)

    def loss(self, scores, phones):
        frames = torch.full((len(phones),), len(scores))
        return self.ctc(scores, phones, frames, torch.full((len(phones),), phones.shape[1]))

    def training_step(self, batch):
        frames, phones = batch
        return {"loss": self.loss(self(frames), phones)}

    def validation_step(self, batch):
        frames, phones = batch
        scores = self(frames)
        said = [[int(p) for p in torch.unique_consecutive(path) if p != BLANK] for path in scores.argmax(-1).T]
        exact = sum(a == b for a, b in zip(said, phones.tolist(), strict=True)) / len(phones)
        return {"loss": self.loss(scores, phones), "exact": exact}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(107)
    sounds = torch.randn(PHONES, 10, generator=g)
    phones = torch.randint(PHONES, (400, 4), generator=g)
    spoken = (torch.arange(5) < 3).float().view(5, 1)
    frames = (sounds[phones].unsqueeze(2) * spoken).flatten(1, 2) + 0.3 * torch.randn(400, 20, 10, generator=g)
    return Splits(
        train=TensorLoader(frames[:320], phones[:320], batch_size=16, shuffle=True),
        val=TensorLoader(frames[320:], phones[320:], batch_size=16),
    )
