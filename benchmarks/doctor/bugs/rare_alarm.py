import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Task(forge.TaskModule):
    """Four alarm levels, of which the higher ones are rare."""

    def __init__(self, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(11, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4)
        )
        counts = torch.tensor([1240.0, 480.0, 170.0, 60.0])
        self.register_buffer("class_weight", counts / counts.sum() * len(counts))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, weight=self.class_weight)
        recall = torch.stack([(logits.argmax(1) == y)[y == k].float().mean() for k in range(4) if (y == k).any()])
        return {"loss": loss, "balanced_accuracy": recall.mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(61)
    y = torch.multinomial(torch.tensor([0.64, 0.25, 0.085, 0.025]), 1950, replacement=True, generator=g)
    centres = 0.8 * torch.randn(4, 11, generator=g)
    x = centres[y] + torch.randn(1950, 11, generator=g)
    dataset = TensorDataset(x, y)
    train, val = random_split(dataset, [1560, len(dataset) - 1560], generator=torch.Generator().manual_seed(34))
    return Splits(
        DataLoader(train, batch_size=64, shuffle=True),
        DataLoader(val, batch_size=64),
    )
