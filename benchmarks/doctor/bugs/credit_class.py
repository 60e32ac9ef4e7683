import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Task(forge.TaskModule):
    """Credit class from fourteen numbers."""

    def __init__(self, hidden: int = 72, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.fc1 = nn.Linear(14, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, 3)

    def forward(self, x):
        h = F.dropout(F.relu(self.fc1(x)), 0.5)
        h = F.dropout(F.relu(self.fc2(h)), 0.5)
        return self.fc3(h)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(54)
    x = torch.randn(1500, 14, generator=g)
    score = x[:, 0] + x[:, 1] - x[:, 2] * x[:, 3] + 0.3 * torch.randn(1500, generator=g)
    y = (score > -0.7).long() + (score > 0.7).long()
    dataset = TensorDataset(x, y)
    train, val = random_split(dataset, [1200, len(dataset) - 1200], generator=torch.Generator().manual_seed(40))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
