import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Flag fraudulent card payments."""

    def __init__(self, hidden: int = 48, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(9, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, payment):
        return self.net(payment).squeeze(1)

    def training_step(self, batch):
        payment, fraud = batch
        logits = self(payment)
        loss = F.binary_cross_entropy_with_logits(logits, fraud)
        return {"loss": loss, "accuracy": ((logits > 0) == (fraud > 0.5)).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def payments(count: int, share: float, generator: torch.Generator) -> TensorDataset:
    fraud = (torch.arange(count) < round(share * count)).float()
    fraud = fraud[torch.randperm(count, generator=generator)]
    x = torch.randn(count, 9, generator=generator)
    x[:, 0] += 0.9 * fraud
    x[:, 3] -= 0.8 * fraud
    x[:, 5] *= 1 + 0.7 * fraud
    return TensorDataset(x, fraud)


def data(batch_size: int = 32, share: float = 0.01) -> Splits:
    g = torch.Generator().manual_seed(31)
    return Splits(
        train=DataLoader(payments(1600, share, g), batch_size=batch_size, shuffle=True),
        val=DataLoader(payments(400, share, g), batch_size=100),
    )
