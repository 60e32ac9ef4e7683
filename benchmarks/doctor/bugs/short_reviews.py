import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class TextEncoder(nn.Module):
    def __init__(self, words: int, width: int):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, tokens):
        _, (h, _) = self.lstm(self.embed(tokens))
        return h[-1]


class Task(forge.TaskModule):
    """Sentiment of a sentence of ten words."""

    def __init__(self, width: int = 24, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.encoder = TextEncoder(90, width)
        self.classifier = nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, tokens):
        return self.classifier(self.encoder(tokens))

    def training_step(self, batch):
        tokens, y = batch
        logits = self(tokens)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.classifier.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(16)
    tokens = torch.randint(90, (1300, 10), generator=g)
    tone = torch.randn(90, generator=g)
    score = tone[tokens].mean(1) * 3.1 + 0.3 * torch.randn(1300, generator=g)
    y = (score > -0.5).long() + (score > 0.5).long()
    dataset = TensorDataset(tokens, y)
    train, val = random_split(dataset, [1040, len(dataset) - 1040], generator=torch.Generator().manual_seed(2))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
