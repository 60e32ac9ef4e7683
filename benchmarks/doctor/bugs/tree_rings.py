import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Task(forge.TaskModule):
    """Age of a tree from ring widths."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def make_dataset():
    g = torch.Generator().manual_seed(68)
    x = torch.randn(900, 20, generator=g)
    y = torch.tanh(x[:, :4].sum(1)) + 0.5 * x[:, 4] * x[:, 5] + 0.4 * torch.randn(900, generator=g)
    return TensorDataset(x, (y - y.mean()) / y.std())


def data() -> Splits:
    dataset = make_dataset()
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(11)).tolist()
    val_set = Subset(dataset, order[:180])
    return Splits(
        train=DataLoader(dataset, batch_size=32, shuffle=True),
        val=DataLoader(val_set, batch_size=60),
    )
