import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Eight kinds of plankton from twenty shape measures."""

    def __init__(self, hidden: int = 64, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 8)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(90)
    centres = 0.6 * torch.randn(8, 20, generator=g)
    parts = [(centres[k] + torch.randn(150, 20, generator=g), torch.full((150,), k)) for k in range(8)]
    x_train = torch.cat([x[:120] for x, _ in parts])
    y_train = torch.cat([y[:120] for _, y in parts])
    x_val = torch.cat([x[120:] for x, _ in parts])
    y_val = torch.cat([y[120:] for _, y in parts])
    return Splits(
        train=DataLoader(TensorDataset(x_train, y_train), batch_size=32),
        val=DataLoader(TensorDataset(x_val, y_val), batch_size=32),
    )
