import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import forge
from forge.data import Splits

PAD, IGNORED, WORDS, TAGS = 0, -100, 60, 5


class Task(forge.TaskModule):
    """A tag for every word of a sentence of two to forty words."""

    def __init__(self, width: int = 32, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, TAGS)

    def forward(self, words):
        return self.out(self.gru(self.embed(words))[0])

    def num_items(self, batch):
        return (batch[1] != IGNORED).sum()

    def training_step(self, batch):
        words, tags = batch
        logits = self(words)
        real = tags != IGNORED
        loss = F.cross_entropy(logits.transpose(1, 2), tags, ignore_index=IGNORED)
        return {"loss": loss, "accuracy": (logits.argmax(-1) == tags)[real].float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def collate(sentences):
    words, tags = zip(*sentences, strict=True)
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=IGNORED)


def data() -> Splits:
    g = torch.Generator().manual_seed(92)
    rule = torch.randint(TAGS, (WORDS, 3), generator=g)
    sentences = []
    for _ in range(600):
        length = int(2 + 38 * torch.rand(1, generator=g) ** 3)
        words = torch.randint(1, WORDS, (length,), generator=g)
        sentences.append((words, rule[words, words.roll(1) % 3]))
    val = sorted(sentences[480:], key=lambda sentence: len(sentence[0]))
    return Splits(
        train=DataLoader(sentences[:480], batch_size=16, shuffle=True, collate_fn=collate),
        val=DataLoader(val, batch_size=16, collate_fn=collate),
    )
