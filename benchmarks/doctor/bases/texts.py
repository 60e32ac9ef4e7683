import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import forge
from forge.data import Splits

PAD, WORDS, CLASSES = 0, 80, 4


class Encoder(nn.Module):
    """The mean over the words of a text."""

    def __init__(self, width: int):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, words):
        real = (words != PAD).unsqueeze(2)
        h, _ = self.gru(self.embed(words))
        return (h * real).sum(1) / real.sum(1)


class Task(forge.TaskModule):
    """The topic of a text of five to fourteen words."""

    def __init__(self, width: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.encoder = Encoder(width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def forward(self, words):
        return self.head(self.encoder(words))

    def training_step(self, batch):
        words, y = batch
        logits = self(words)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def collate(samples):
    texts, y = zip(*samples, strict=True)
    return pad_sequence(texts, batch_first=True, padding_value=PAD), torch.stack(y)


def data() -> Splits:
    g = torch.Generator().manual_seed(4)
    y = torch.randint(4, (1000,), generator=g)
    likely = torch.softmax(1.5 * torch.randn(4, WORDS - 1, generator=g), 1)
    words = 1 + torch.multinomial(likely[y], 14, replacement=True, generator=g)
    lengths = torch.randint(5, 15, (1000,), generator=g).tolist()
    samples = [(text[:length], label) for text, length, label in zip(words, lengths, y, strict=True)]
    return Splits(
        train=DataLoader(samples[:800], batch_size=32, shuffle=True, collate_fn=collate),
        val=DataLoader(samples[800:], batch_size=50, collate_fn=collate),
    )
