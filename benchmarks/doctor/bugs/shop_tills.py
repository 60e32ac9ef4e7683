import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Takings of the tills of several shops, with a head for each shop."""

    def __init__(self, shops: int = 5, hidden: int = 48, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.trunk = nn.Sequential(nn.Linear(10, hidden), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(hidden, 1) for _ in range(shops))

    def forward(self, x, shop):
        h = self.trunk(x)
        prediction = h.new_zeros(len(x))
        for number in shop.unique().tolist():
            mine = shop == number
            prediction[mine] = self.heads[number](h[mine]).squeeze(1)
        return prediction

    def training_step(self, batch):
        x, shop, y = batch
        return {"loss": F.mse_loss(self(x, shop), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(58)
    x = torch.randn(1000, 10, generator=g)
    shop = torch.randint(3, (1000,), generator=g)
    y = (x * torch.randn(3, 10, generator=g)[shop]).sum(1) / 3 + 0.1 * torch.randn(1000, generator=g)
    return Splits(
        train=TensorLoader(x[:800], shop[:800], y[:800], batch_size=32, shuffle=True),
        val=TensorLoader(x[800:], shop[800:], y[800:], batch_size=50),
    )
