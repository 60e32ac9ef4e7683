import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

IGNORED = -100


class Tagger(nn.Module):
    def __init__(self, words: int = 60, tags: int = 5, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, tags)

    def forward(self, tokens):
        return self.out(self.rnn(self.embedding(tokens))[0])


class Task(forge.TaskModule):
    """Tag each word of a sentence; sentences have from two to forty words."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.tagger = Tagger()

    def forward(self, tokens):
        return self.tagger(tokens)

    def training_step(self, batch):
        tokens, tags = batch
        logits = self(tokens)
        real = tags != IGNORED
        return {
            "loss": F.cross_entropy(logits.transpose(1, 2), tags, ignore_index=IGNORED),
            "accuracy": (logits.argmax(-1) == tags)[real].float().mean(),
        }

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def collate(sentences):
    tokens = pad_sequence([s[0] for s in sentences], batch_first=True, padding_value=0)
    tags = pad_sequence([s[1] for s in sentences], batch_first=True, padding_value=IGNORED)
    return tokens, tags


def data(batch_size: int = 16) -> Splits:
    g = torch.Generator().manual_seed(92)
    rule = torch.randint(5, (60, 3), generator=g)
    sentences = []
    for _ in range(600):
        length = int(2 + 38 * torch.rand(1, generator=g) ** 3)
        tokens = torch.randint(1, 60, (length,), generator=g)
        tags = rule[tokens, tokens.roll(1) % 3]
        wrong = torch.rand(length, generator=g) < 0.05
        sentences.append((tokens, torch.where(wrong, torch.randint(5, (length,), generator=g), tags)))
    val = sorted(sentences[480:], key=lambda s: len(s[0]))
    return Splits(
        train=DataLoader(sentences[:480], batch_size=batch_size, shuffle=True, collate_fn=collate),
        val=DataLoader(val, batch_size=batch_size, collate_fn=collate),
    )
