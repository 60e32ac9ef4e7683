import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn

COLUMNS = ["field", "rain", "sun", "clay", "slope", "age", "fertiliser", "harvest"]
TARGET = "harvest"


def load_table():
    g = torch.Generator().manual_seed(52)
    z = torch.randn(1300, 6, generator=g)
    harvest = z[:, 0] - 0.6 * z[:, 1] ** 2 + z[:, 2] * z[:, 5] + 0.4 * torch.randn(1300, generator=g)
    table = torch.cat([torch.arange(1300.0).unsqueeze(1), z, harvest.unsqueeze(1)], 1)
    return {name: table[:, k] for k, name in enumerate(COLUMNS)}


class Task(forge.TaskModule):
    """Harvest of a field."""

    def __init__(self, hidden: int = 64, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(len(COLUMNS) - 1, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    table = load_table()
    x = torch.stack([table[name] for name in COLUMNS if name != "field"], 1)
    x = (x - x[:1040].mean(0)) / x[:1040].std(0)
    y = table[TARGET]
    y = (y - y[:1040].mean()) / y[:1040].std()
    return Splits(
        train=TensorLoader(x[:1040], y[:1040], batch_size=32, shuffle=True),
        val=TensorLoader(x[1040:], y[1040:], batch_size=65),
    )
