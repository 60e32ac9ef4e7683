import forge
import torch
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

QUANTILES = (0.1, 0.5, 0.9)


def pinball(prediction, target, quantiles):
    q = torch.tensor(quantiles, device=prediction.device)
    error = target.unsqueeze(1) - prediction
    return torch.maximum((q - 1) * -error, q * -error).mean()


class Task(forge.TaskModule):
    """Three quantiles of tomorrow's load."""

    def __init__(self, hidden: int = 56, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(9, hidden), nn.ELU(), nn.Linear(hidden, hidden), nn.ELU())
        self.out = nn.Linear(hidden, len(QUANTILES))

    def forward(self, x):
        return self.out(self.net(x))

    def training_step(self, batch):
        x, load = batch
        prediction = self(x)
        coverage = ((load > prediction[:, 0]) & (load < prediction[:, 2])).float().mean()
        return {"loss": pinball(prediction, load, QUANTILES), "coverage": coverage}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(9)
    x = torch.randn(1500, 9, generator=g)
    spread = 0.2 + 0.4 * torch.sigmoid(x[:, 5])
    load = x[:, 0] - 0.6 * x[:, 1].abs() + 0.5 * x[:, 2] * x[:, 3] + spread * torch.randn(1500, generator=g)
    load = (load - load.mean()) / load.std()
    train = TensorDataset(x[:1200], load[:1200])
    val = TensorDataset(x[1200:], load[1200:])
    return Splits(train=DataLoader(train, batch_size=32, shuffle=True), val=DataLoader(val, batch_size=32))
