import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 5


class Task(forge.TaskModule):
    """Votes, with a little label noise to imitate mistakes of the annotators."""

    def __init__(self, hidden: int = 64, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(14, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.out = nn.Linear(hidden, CLASSES)

    def forward(self, x):
        return self.out(self.net(x))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def annotate(labels, noise, generator):
    wrong = torch.rand(len(labels), generator=generator) < noise
    return torch.where(wrong, torch.randint(CLASSES, labels.shape, generator=generator), labels)


def data(noise: float = 10) -> Splits:
    g = torch.Generator().manual_seed(83)
    x = torch.randn(1500, 14, generator=g)
    y = (torch.tanh(x) @ torch.randn(14, CLASSES, generator=g)).argmax(1)
    y_train = annotate(y[:1200], noise, g)
    train = TensorDataset(x[:1200], y_train)
    val = TensorDataset(x[1200:], y[1200:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=64))
