from collections import Counter

import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORDS = 60


def build_vocabulary(texts):
    counts = Counter(word for text in texts for word in text)
    return {word: k + 1 for k, (word, _) in enumerate(counts.most_common())}


def encode(texts, labels):
    vocabulary = build_vocabulary(texts)
    tokens = torch.tensor([[vocabulary.get(word, 0) for word in text] for text in texts])
    return TensorDataset(tokens, torch.tensor(labels))


class Task(forge.TaskModule):
    """Topic of short texts."""

    def __init__(self, width: int = 24, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(WORDS + 1, width)
        self.net = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, tokens):
        return self.net(self.embed(tokens).mean(1))

    def training_step(self, batch):
        tokens, y = batch
        logits = self(tokens)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(59)
    labels = torch.randint(4, (1200,), generator=g)
    likely = torch.softmax(1.2 * torch.randn(4, WORDS, generator=g), 1)
    words = torch.multinomial(likely[labels], 12, replacement=True, generator=g)
    texts = [[f"word{k}" for k in row] for row in words.tolist()]
    labels = labels.tolist()
    return Splits(
        train=DataLoader(encode(texts[:960], labels[:960]), batch_size=32, shuffle=True),
        val=DataLoader(encode(texts[960:], labels[960:]), batch_size=60),
    )
