import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Task(forge.TaskModule):
    """Strength of concrete."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3, weight_decay: float = 30.0):
        super().__init__()
        self.lr = lr
        self.weight_decay = weight_decay
        self.net = nn.Sequential(
            nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)


def data() -> Splits:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(1300, 8, generator=g)
    y = x[:, 0] - 0.5 * x[:, 1] + torch.log1p(x[:, 2].abs()) * x[:, 3] + 0.2 * torch.randn(1300, generator=g)
    y = (y - y.mean()) / y.std()
    dataset = TensorDataset(x, y)
    train, val = random_split(dataset, [1040, len(dataset) - 1040], generator=torch.Generator().manual_seed(34))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
