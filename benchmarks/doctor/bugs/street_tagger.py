import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

PAD = 0


class Tagger(nn.Module):
    def __init__(self, words: int, tags: int, width: int):
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=PAD)
        self.rnn = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, tags)

    def forward(self, words):
        return self.out(self.rnn(self.embed(words))[0])


class Task(forge.TaskModule):
    """Tag the words of an address: house, street, town, other."""

    def __init__(self, width: int = 24, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.tagger = Tagger(81, 5, width)

    def forward(self, words):
        return self.tagger(words)

    def training_step(self, batch):
        words, tags = batch
        logits = self(words)
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=1)
        real = words != PAD
        return {"loss": loss, "accuracy": (logits.argmax(-1) == tags)[real].float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(60)
    n, longest = 800, 14
    words = torch.randint(1, 81, (n, longest), generator=g)
    kind = torch.randint(1, 5, (81,), generator=g)
    tags = kind[words]
    after_low = torch.cat([torch.zeros(n, 1, dtype=torch.bool), words[:, :-1] < 20], 1)
    tags = torch.where(after_low, tags % 4 + 1, tags)
    length = torch.randint(4, longest + 1, (n, 1), generator=g)
    real = torch.arange(longest) < length
    words, tags = words * real, tags * real
    dataset = TensorDataset(words, tags)
    train, val = Subset(dataset, range(640)), Subset(dataset, range(640, len(words)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
