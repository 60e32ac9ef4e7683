"""Padded sequences: is a review for or against? Reviews of different lengths, batched by length, padding left out.

The reviews are generated, not written by people: an honest grammar of opinions among small talk, in which "not bad" is
praise and "nobody could call the plot dull" too. Counting good and bad words is not enough to tell them apart.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import forge
from forge.data import Bucketed, Loader, Splits, pad_collate
from forge.data.collate import Padded

Batch = tuple[Padded, Tensor]

GOOD = ["good", "great", "moving", "clever", "fresh", "brilliant", "funny", "warm", "gripping", "charming"]
BAD = ["bad", "awful", "dull", "clumsy", "stale", "tedious", "bland", "cold", "boring", "annoying"]
SUBJECTS = ["the plot", "the cast", "the music", "the ending", "the camera", "every scene", "the film"]
DEGREES = ["", "", "very", "really", "rather"]
PLAIN = ["{subject} was {degree} {word}", "i found {subject} {degree} {word}", "{degree} {word}"]
TURNED = [
    "{subject} was not {degree} {word}",
    "not {word}",
    "nobody could call {subject} {word}",
    "i would not say that {subject} was {degree} {word}",
    "{subject} was far from {word}",
]
ASIDES = [
    "we saw it on a rainy evening in a small town by the sea",
    "my brother had bought the tickets weeks before",
    "it runs for about two hours",
    "the hall was full",
    "there is a train in it",
]
GRAMMAR = [*GOOD, *BAD, *SUBJECTS, *DEGREES, *PLAIN, *TURNED, *ASIDES, ","]
WORDS = sorted({word for text in GRAMMAR for word in text.split() if "{" not in word})
TOKENS = {word: token for token, word in enumerate(WORDS, start=1)}
"""Every word of the grammar; 0 is padding."""


def review(draw: random.Random) -> tuple[str, int]:
    """A review of 1 to 5 opinions and up to 4 asides, and its label: 1 where most opinions are good, else 0."""
    opinions = [draw.random() < 0.5 for _ in range(draw.choice([1, 3, 5]))]
    parts = [opinion(is_good, draw) for is_good in opinions] + draw.sample(ASIDES, draw.randint(0, 4))
    draw.shuffle(parts)
    return " , ".join(parts), int(2 * sum(opinions) > len(opinions))


def opinion(is_good: bool, draw: random.Random) -> str:
    """A good or a bad opinion, said plainly or by denying its opposite."""
    turned = draw.random() < 0.4
    form, words = draw.choice(TURNED if turned else PLAIN), GOOD if is_good != turned else BAD
    text = form.format(subject=draw.choice(SUBJECTS), degree=draw.choice(DEGREES), word=draw.choice(words))
    return " ".join(text.split())


class Reviews(Dataset[tuple[Tensor, int]]):
    """`samples` reviews as (tokens, label), always the same for a seed."""

    pure = True  # nothing is drawn when a sample is read

    def __init__(self, samples: int, seed: int):
        draw = random.Random(seed)
        self.texts, self.labels = zip(*(review(draw) for _ in range(samples)), strict=True)
        self.tokens = [torch.tensor([TOKENS[word] for word in text.split()]) for text in self.texts]
        self.lengths = [len(tokens) for tokens in self.tokens]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.tokens[index], self.labels[index]


class Sentiment(forge.TaskModule):
    """A GRU over words, and a yes or no from its state after the last of them; what is padded comes later."""

    def __init__(self, width: int = 64, dropout: float = 0.2, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.words = nn.Embedding(len(WORDS) + 1, width, padding_idx=0)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, 2))

    def forward(self, text: Padded) -> Tensor:
        states, _ = self.gru(self.words(text.values))
        rows = torch.arange(len(states), device=states.device)
        return self.head(states[rows, text.lengths - 1])

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        text, labels = batch
        logits = self(text)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy, "padding": 1 - text.mask.float().mean()}

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def reviews(train: int = 4000, val: int = 1000, batch_size: int = 64, bucketed: bool = True) -> Splits:
    """Generated reviews; with `bucketed`, those of about the same length go together, so that little is padded."""
    texts, held_out = Reviews(train, seed=1998), Reviews(val, seed=1999)
    order: dict[str, Any] = {"sampler": Bucketed(texts.lengths)} if bucketed else {"shuffle": True}
    return Splits(
        train=Loader(texts, batch_size, collate_fn=pad_collate, **order),
        val=Loader(held_out, 250, collate_fn=pad_collate),
    )
