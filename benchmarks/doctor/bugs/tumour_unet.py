import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR


class Task(forge.TaskModule):
    """Segment an ellipse in a scan."""

    def __init__(self, width: int = 12, lr: float = 3e-3, epochs: int = 10):
        super().__init__()
        self.lr = lr
        self.epochs = epochs
        self.down1 = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x):
        a = self.down1(x)
        b = F.relu(self.up(self.down2(a)))
        return self.out(torch.cat([a, b], 1))

    def training_step(self, batch):
        x, mask = batch
        logits = self(x)
        p = torch.sigmoid(logits)
        dice = 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)
        return {"loss": F.binary_cross_entropy_with_logits(logits, mask) + dice, "dice": 1 - dice}

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return optimizer, CosineAnnealingLR(optimizer, T_max=self.epochs)


def data() -> Splits:
    g = torch.Generator().manual_seed(76)
    n = 320
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    c = 4 + 8 * torch.rand(n, 2, 1, 1, generator=g)
    r = 2 + 2.5 * torch.rand(n, 2, 1, 1, generator=g)
    mask = (((xx - c[:, 0]) / r[:, 0]).square() + ((yy - c[:, 1]) / r[:, 1]).square() < 1).float().unsqueeze(1)
    x = 1.4 * mask + torch.randn(n, 1, 16, 16, generator=g)
    x = (x - x.mean()) / x.std()
    return Splits(
        train=TensorLoader(x[:256], mask[:256], batch_size=16, shuffle=True),
        val=TensorLoader(x[256:], mask[256:], batch_size=16),
    )
