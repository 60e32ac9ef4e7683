import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Backbone(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        sizes = [1, width, width, 2 * width]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(sizes, sizes[1:], strict=False))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in sizes[1:])

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(conv(x))), 2)
        return x.flatten(1)

    def train(self, mode: bool = True):
        super().train(mode)
        for norm in self.norms:
            norm.eval()
        return self


class Task(forge.TaskModule):
    """Stripes, checks or dots."""

    def __init__(self, width: int = 12, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.backbone = Backbone(width)
        self.head = nn.Linear(8 * width, 3)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def data() -> Splits:
    g = torch.Generator().manual_seed(45)
    n = 600
    y = torch.randint(3, (n,), generator=g)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    f = 1.0 + 0.8 * torch.rand(n, 1, 1, generator=g)
    a, b = (6.28 * torch.rand(n, 1, 1, generator=g) for _ in range(2))
    stripes = torch.sign(torch.sin(f * (xx + yy) + a))
    checks = torch.sign(torch.sin(f * xx + a) * torch.sin(f * yy + b))
    dots = ((torch.sin(f * xx + a) + torch.sin(f * yy + b)) > 1).float() * 2 - 1
    x = torch.stack([stripes, checks, dots], 1)[torch.arange(n), y].unsqueeze(1)
    x = x + 1.8 * torch.randn(x.shape, generator=g)
    x = (x - x.mean()) / x.std()
    dataset = TensorDataset(x, y)
    train, val = random_split(dataset, [480, len(dataset) - 480], generator=torch.Generator().manual_seed(30))
    return Splits(
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=32),
    )
