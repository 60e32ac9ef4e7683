import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Hardness of steel."""

    def __init__(self, hidden: int = 48, lr: float = 0.05, clip: float = 1e-6):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )
        for p in self.parameters():
            p.register_hook(lambda grad: grad.clamp(-clip, clip))

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def data() -> Splits:
    g = torch.Generator().manual_seed(71)
    x = torch.randn(1300, 12, generator=g)
    y = x[:, 0] + torch.relu(x[:, 1]) * x[:, 2] - 0.4 * x[:, 3] + 0.2 * torch.randn(1300, generator=g)
    y = (y - y.mean()) / y.std()
    train = TensorDataset(x[:1040], y[:1040])
    val = TensorDataset(x[1040:], y[1040:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
