import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def deep_net(inputs: int, outputs: int, width: int, depth: int) -> nn.Sequential:
    layers = [nn.Linear(inputs, width), nn.Sigmoid()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Sigmoid()]
    layers.append(nn.Linear(width, outputs))
    return nn.Sequential(*layers)


class Task(forge.TaskModule):
    """Classify tabular records into three risk groups."""

    def __init__(self, width: int = 48, depth: int = 12, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = deep_net(10, 3, width, depth)

    def forward(self, record):
        return self.net(record)

    def training_step(self, batch):
        record, risk = batch
        logits = self(record)
        return {"loss": F.cross_entropy(logits, risk), "accuracy": (logits.argmax(1) == risk).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 64) -> Splits:
    g = torch.Generator().manual_seed(66)
    record = torch.randn(1800, 10, generator=g)
    score = record[:, 0] * record[:, 1] + record[:, 2] - 0.5 * record[:, 3] + 0.3 * torch.randn(1800, generator=g)
    risk = torch.bucketize(score, torch.tensor([-0.6, 0.6]))
    return Splits(
        train=DataLoader(TensorDataset(record[:1440], risk[:1440]), batch_size=batch_size, shuffle=True),
        val=DataLoader(TensorDataset(record[1440:], risk[1440:]), batch_size=90),
    )
