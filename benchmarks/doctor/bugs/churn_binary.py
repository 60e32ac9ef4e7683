import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Whether a customer leaves; about one in ten does."""

    def __init__(self, hidden: int = 48, positive_rate: float = 0.1, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.plan = nn.Embedding(5, 6)
        self.net = nn.Sequential(nn.Linear(10 + 6, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.out = nn.Linear(hidden, 1)
        self.register_buffer("pos_weight", torch.tensor(positive_rate / (1 - positive_rate)))

    def forward(self, numbers, plan):
        h = self.net(torch.cat([numbers, self.plan(plan)], 1))
        return self.out(h).squeeze(1)

    def training_step(self, batch):
        numbers, plan, left = batch
        logit = self(numbers, plan)
        loss = F.binary_cross_entropy_with_logits(logit, left, pos_weight=self.pos_weight)
        found = ((logit > 0) & left.bool()).sum() / left.sum().clamp(min=1)
        return {"loss": loss, "recall": found.float()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(39)
    numbers = torch.randn(2000, 10, generator=g)
    plan = torch.randint(5, (2000,), generator=g)
    effect = torch.randn(5, generator=g)
    risk = numbers[:, 0] + numbers[:, 1] * numbers[:, 2] + effect[plan] + 0.4 * torch.randn(2000, generator=g)
    left = (risk > torch.quantile(risk, 0.9)).float()
    return Splits(
        train=TensorLoader(numbers[:1600], plan[:1600], left[:1600], batch_size=64, shuffle=True),
        val=TensorLoader(numbers[1600:], plan[1600:], left[1600:], batch_size=64),
    )
