import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Classifier(nn.Module):
    def __init__(self, vocabulary: int, classes: int, width: int = 48, keep: float = 0.95):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.dropout = nn.Dropout(keep)
        self.out = nn.Linear(width, classes)

    def forward(self, tokens):
        h = self.embedding(tokens).transpose(1, 2)
        h = F.relu(self.conv(h)).amax(dim=2)
        return self.out(self.dropout(h))


class Task(forge.TaskModule):
    """Route a support ticket to one of six desks."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.model = Classifier(vocabulary=120, classes=6)

    def forward(self, tokens):
        return self.model(tokens)

    def training_step(self, batch):
        tokens, desk = batch
        logits = self(tokens)
        return {"loss": F.cross_entropy(logits, desk), "accuracy": (logits.argmax(1) == desk).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(37)
    desk = torch.randint(6, (1500,), generator=g)
    own = desk.unsqueeze(1) * 20 + torch.randint(20, (1500, 14), generator=g)
    common = torch.randint(120, (1500, 14), generator=g)
    tokens = torch.where(torch.rand(1500, 14, generator=g) < 0.25, own, common)
    return Splits(
        train=TensorLoader(tokens[:1200], desk[:1200], batch_size=batch_size, shuffle=True),
        val=TensorLoader(tokens[1200:], desk[1200:], batch_size=100),
    )
