import torch
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """How long pumps last, many of which still run when the study ends."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)

    def loss(self, batch):
        x, time, failed = batch
        log_hazard = self(x)
        return -(failed * log_hazard - log_hazard.exp() * time).mean()

    def training_step(self, batch):
        return {"loss": self.loss(batch)}

    def validation_step(self, batch):
        x, time, failed = batch
        risk = self(x)
        comparable = failed[:, None].bool() & (time[:, None] < time[None])
        ordered = (risk[:, None] > risk[None]) & comparable
        return {"loss": self.loss(batch), "concordance": ordered.sum() / comparable.sum().clamp(min=1)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(179)
    x = torch.randn(700, 6, generator=g)
    failure = -torch.log(torch.rand(700, generator=g)) / torch.exp(0.4 * x @ torch.randn(6, generator=g))
    end = 0.2 + torch.rand(700, generator=g)
    rows = x, torch.minimum(failure, end), (failure <= end).float()
    return Splits(
        train=TensorLoader(*(row[:560] for row in rows), batch_size=28, shuffle=True),
        val=TensorLoader(*(row[560:] for row in rows), batch_size=140),
    )
