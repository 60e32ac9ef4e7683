import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Task(forge.TaskModule):
    """Sentiment of short token sequences with a one-dimensional convolution."""

    def __init__(self, vocabulary: int = 60, width: int = 32, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.width = width
        self.embed = nn.Embedding(vocabulary, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Linear(width, 2)

    def forward(self, tokens):
        h = F.relu(self.conv(self.embed(tokens).transpose(1, 2)))
        h = h.mean(2)
        project = nn.Linear(self.width, self.width)
        return self.out(F.relu(project(h)))

    def training_step(self, batch):
        tokens, y = batch
        logits = self(tokens)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(93)
    tokens = torch.randint(60, (1200, 18), generator=g)
    tone = torch.randn(60, generator=g)
    negation = tokens[:, :-1] < 6
    score = (tone[tokens[:, 1:]] * torch.where(negation, -1.5, 1.0)).sum(1) + 0.5 * torch.randn(1200, generator=g)
    y = (score > 0).long()
    dataset = TensorDataset(tokens, y)
    train, val = random_split(dataset, [960, len(dataset) - 960], generator=torch.Generator().manual_seed(31))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
