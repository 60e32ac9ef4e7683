import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Whether the third kind of token comes before the first kind."""

    def __init__(self, vocabulary: int = 12, width: int = 32, length: int = 14, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 2)

    def forward(self, tokens):
        h = self.embed(tokens) + self.position
        return self.out(self.encoder(h).mean(1))

    def training_step(self, batch):
        tokens, y = batch
        logits = self(tokens)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(91)
    n, length = 1200, 14
    tokens = torch.randint(4, 12, (n, length), generator=g)
    places = torch.rand(n, length, generator=g).argsort(1)[:, :2]
    tokens.scatter_(1, places[:, :1], 1)
    tokens.scatter_(1, places[:, 1:], 3)
    y = (places[:, 1] < places[:, 0]).long()
    flip = torch.rand(n, generator=g) < 0.03
    y = torch.where(flip, 1 - y, y)
    dataset = TensorDataset(tokens, y)
    train, val = Subset(dataset, range(960)), Subset(dataset, range(960, len(tokens)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
