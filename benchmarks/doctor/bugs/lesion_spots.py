import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def focal_loss(logits, target, gamma: float = 2.0, alpha: float = 0.75):
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    pt = torch.exp(-ce)
    weight = alpha * target + (1 - alpha) * (1 - target)
    return (weight * pt**gamma * ce).mean()


class Task(forge.TaskModule):
    """Segment small bright spots in a noisy picture."""

    def __init__(self, width: int = 16, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 1, 1),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, mask = batch
        logits = self(x)
        overlap = ((logits > 0) & mask.bool()).sum()
        union = ((logits > 0) | mask.bool()).sum().clamp(min=1)
        return {"loss": focal_loss(logits, mask), "iou": overlap / union}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(33)
    n = 400
    yy, xx = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
    cx, cy = (3 + 14 * torch.rand(n, 1, 1, generator=g) for _ in range(2))
    r = 1.2 + 1.6 * torch.rand(n, 1, 1, generator=g)
    mask = ((xx - cx).square() + (yy - cy).square() < r.square()).float()
    x = mask * (1.2 + 0.6 * torch.rand(n, 1, 1, generator=g)) + 0.7 * torch.randn(n, 20, 20, generator=g)
    x = ((x - x.mean()) / x.std()).unsqueeze(1)
    mask = mask.unsqueeze(1)
    dataset = TensorDataset(x, mask)
    train, val = random_split(dataset, [320, len(dataset) - 320], generator=torch.Generator().manual_seed(3))
    return Splits(
        DataLoader(train, batch_size=16, shuffle=True),
        DataLoader(val, batch_size=16),
    )
