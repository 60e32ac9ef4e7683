import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Yield of a reactor, which depends on how the settings act together."""

    def __init__(self, hidden: int = 96, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Linear(10, hidden), nn.Linear(hidden, hidden), nn.Dropout(0.05))
        self.head = nn.Sequential(nn.Linear(hidden, hidden // 2), nn.Linear(hidden // 2, 1))

    def forward(self, x):
        return self.head(self.encoder(x)).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(62)
    x = torch.randn(1600, 10, generator=g)
    y = x[:, 0] * x[:, 1] + x[:, 2].abs() - torch.cos(2 * x[:, 3]) + 0.2 * x[:, 4]
    y = y + 0.15 * torch.randn(1600, generator=g)
    y = (y - y.mean()) / y.std()
    dataset = TensorDataset(x, y)
    train, val = Subset(dataset, range(1280)), Subset(dataset, range(1280, len(x)))
    return Splits(
        train=DataLoader(train, batch_size=32, shuffle=True),
        val=DataLoader(val, batch_size=32),
    )
