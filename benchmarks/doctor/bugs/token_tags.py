import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """One of ten tags for each of ten tokens."""

    def __init__(self, words: int = 70, tags: int = 10, width: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(words, width)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, tags)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0])

    def training_step(self, batch):
        tokens, tags = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten())
        return {"loss": loss, "accuracy": (logits.argmax(1) == tags).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(48)
    tokens = torch.randint(70, (900, 10), generator=g)
    kind = torch.randint(10, (70,), generator=g)
    before = torch.cat([torch.zeros(900, 1, dtype=torch.long), tokens[:, :-1]], 1)
    tags = torch.where(before > 50, (kind[tokens] + 1) % 10, kind[tokens])
    tags = torch.where(torch.rand(900, 10, generator=g) < 0.04, torch.randint(10, (900, 10), generator=g), tags)
    return Splits(
        train=TensorLoader(tokens[:720], tags[:720], batch_size=32, shuffle=True),
        val=TensorLoader(tokens[720:], tags[720:], batch_size=32),
    )
