import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Scale(nn.Module):
    """Normalises features and scales them with learnt factors."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean = x.mean(dim=0, keepdim=True)
        var = x.var(dim=0, keepdim=True, unbiased=False)
        return self.gain * (x - mean) / torch.sqrt(var + self.eps) + self.shift


class Task(forge.TaskModule):
    """Predict the yield of a field from nine measurements."""

    def __init__(self, hidden: int = 64, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(9, hidden),
            Scale(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            Scale(hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, field):
        return self.net(field).squeeze(-1)

    def training_step(self, batch):
        field, harvest = batch
        return {"loss": F.mse_loss(self(field), harvest)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 40) -> Splits:
    g = torch.Generator().manual_seed(60)
    field = torch.randn(1500, 9, generator=g)
    harvest = torch.tanh(field @ torch.randn(9, 12, generator=g) / 2) @ torch.randn(12, generator=g)
    harvest = harvest + 0.3 * torch.randn(1500, generator=g)
    harvest = (harvest - harvest[:1200].mean()) / harvest[:1200].std()
    return Splits(
        train=TensorLoader(field[:1200], harvest[:1200], batch_size=batch_size, shuffle=True),
        val=TensorLoader(field[1200:], harvest[1200:], batch_size=100),
    )
