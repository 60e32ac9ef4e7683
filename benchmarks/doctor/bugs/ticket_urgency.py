import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


class Task(forge.TaskModule):
    """Urgency of a ticket of up to thirty words."""

    def __init__(self, vocabulary: int = 101, width: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, 3)

    def forward(self, words):
        h, _ = self.lstm(self.embed(words))
        return self.out(h[:, -1])

    def training_step(self, batch):
        words, y = batch
        logits = self(words)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def collate(samples):
    words, urgency = zip(*samples, strict=True)
    return pad_sequence(words, batch_first=True, padding_value=0), torch.stack(urgency)


def data() -> Splits:
    g = torch.Generator().manual_seed(20)
    weight = torch.randn(101, generator=g)
    samples = []
    for _ in range(900):
        words = torch.randint(1, 101, (int(torch.randint(3, 31, (1,), generator=g)),), generator=g)
        score = weight[words[-6:]].mean() * 2.2 + 0.2 * torch.randn((), generator=g)
        samples.append((words, (score > -0.6).long() + (score > 0.6).long()))
    return Splits(
        train=DataLoader(samples[:720], batch_size=32, shuffle=True, collate_fn=collate),
        val=DataLoader(samples[720:], batch_size=32, collate_fn=collate),
    )
