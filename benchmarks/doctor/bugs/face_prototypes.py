import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Embedder(nn.Module):
    def __init__(self, features: int, width: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, x):
        return F.normalize(self.net(x), dim=0)


class Task(forge.TaskModule):
    """Recognise one of ten persons by the cosine to their prototype."""

    def __init__(self, width: int = 24, scale: float = 10.0, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.scale = scale
        self.embed = Embedder(32, width)
        self.prototypes = nn.Parameter(torch.randn(10, width))

    def forward(self, x):
        return self.scale * self.embed(x) @ F.normalize(self.prototypes, dim=1).T

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(34)
    y = torch.randint(10, (1400,), generator=g)
    faces = torch.randn(10, 32, generator=g)
    light = 0.5 + torch.rand(1400, 1, generator=g)
    x = faces[y] * light + 1.2 * torch.randn(1400, 32, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    dataset = TensorDataset(x, y)
    train, val = random_split(dataset, [1120, len(dataset) - 1120], generator=torch.Generator().manual_seed(8))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
