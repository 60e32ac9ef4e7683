import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Sort soil samples into six groups by twelve measurements."""

    def __init__(self, hidden: int = 96, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(nn.Linear(12, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.head = nn.Linear(hidden, 6)

    def forward(self, x):
        scores = self.head(self.body(x))
        return F.log_softmax(scores, dim=0)

    def step(self, batch):
        x, group = batch
        log_probs = self(x)
        loss = F.nll_loss(log_probs, group)
        accuracy = (log_probs.argmax(dim=1) == group).float().mean()
        return {"loss": loss, "accuracy": accuracy}

    def training_step(self, batch):
        return self.step(batch)

    def validation_step(self, batch):
        return self.step(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(5)
    centres = 1.4 * torch.randn(6, 2, 12, generator=g)
    group = torch.randint(6, (1600,), generator=g)
    side = torch.randint(2, (1600,), generator=g)
    x = centres[group, side] + torch.randn(1600, 12, generator=g)
    x = (x - x[:1280].mean(0)) / x[:1280].std(0)
    train = TensorDataset(x[:1280], group[:1280])
    val = TensorDataset(x[1280:], group[1280:])
    return Splits(
        train=DataLoader(train, batch_size=batch_size, shuffle=True),
        val=DataLoader(val, batch_size=64),
    )
