import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Intent of a command of eight words."""

    def __init__(self, words: int = 40, width: int = 40, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(words, width)
        self.gru = nn.GRU(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(width, 4)

    def forward(self, words):
        h, _ = self.gru(self.embed(words))
        return self.out(h[:, 0])

    def training_step(self, batch):
        words, y = batch
        logits = self(words)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(67)
    words = torch.randint(40, (1200, 8), generator=g)
    meaning = torch.randn(40, 4, generator=g)
    y = (meaning[words].sum(1) + 0.5 * torch.randn(1200, 4, generator=g)).argmax(1)
    train = TensorDataset(words[:960], y[:960])
    val = TensorDataset(words[960:], y[960:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
