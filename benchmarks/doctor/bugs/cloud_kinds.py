import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(forge.TaskModule):
    """Kind of cloud in a small picture."""

    def __init__(self, width: int = 24, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.InstanceNorm2d(width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.out = nn.Linear(width, 4)

    def forward(self, x):
        return self.out(self.net(x))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(51)
    n = 500
    y = torch.randint(4, (n,), generator=g)
    noise = torch.randn(n, 1, 14, 14, generator=g)
    kinds = [noise] + [F.avg_pool2d(noise, k, 1, k // 2, count_include_pad=False) for k in (3, 5)]
    kinds.append(noise.cumsum(3) / 3)
    kinds = [kind / kind.std((1, 2, 3), keepdim=True) for kind in kinds]
    x = torch.stack(kinds, 1)[torch.arange(n), y] + 0.3 * torch.randn(n, 1, 14, 14, generator=g)
    train = TensorDataset(x[:400], y[:400])
    val = TensorDataset(x[400:], y[400:])
    return Splits(train=DataLoader(train, batch_size=16, shuffle=True), val=DataLoader(val, batch_size=16))
