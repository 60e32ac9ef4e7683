import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class TextEncoder:
    """Embeds tokens, runs a GRU over them and gives its last state."""

    def __init__(self, vocabulary: int, width: int = 32):
        self.embedding = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, width, batch_first=True)

    def encode(self, tokens):
        _, state = self.gru(self.embedding(tokens))
        return state[-1]


class Task(forge.TaskModule):
    """Say which of five phrases occurs in a sentence."""

    def __init__(self, vocabulary: int = 40, phrases: int = 5, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.encoder = TextEncoder(vocabulary)
        self.classifier = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, phrases))

    def forward(self, tokens):
        return self.classifier(self.encoder.encode(tokens))

    def training_step(self, batch):
        tokens, phrase = batch
        logits = self(tokens)
        return {"loss": F.cross_entropy(logits, phrase), "accuracy": (logits.argmax(1) == phrase).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(64)
    known = torch.randint(40, (5, 3), generator=g)
    tokens = torch.randint(40, (1500, 12), generator=g)
    phrase = torch.randint(5, (1500,), generator=g)
    start = torch.randint(10, (1500,), generator=g)
    positions = start.unsqueeze(1) + torch.arange(3)
    tokens.scatter_(1, positions, known[phrase])
    return Splits(
        train=TensorLoader(tokens[:1200], phrase[:1200], batch_size=batch_size, shuffle=True),
        val=TensorLoader(tokens[1200:], phrase[1200:], batch_size=100),
    )
