import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class SmallResNet(nn.Module):
    def __init__(self, classes: int = 10, width: int = 16):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn0 = nn.BatchNorm2d(width)
        self.bn1 = nn.BatchNorm2d(width)
        self.bn2 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width * 9, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn0(self.stem(x))), 2)
        x = x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(F.max_pool2d(F.relu(x), 2).flatten(1))


class Task(forge.TaskModule):
    """Fit a network of ten outputs to a problem of four classes."""

    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.net = SmallResNet()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr)
        self.net.fc = nn.Linear(self.net.fc.in_features, 4)

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch):
        images, labels = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return self.optimizer


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(6)
    labels = torch.randint(4, (800,), generator=g)
    shifts = torch.randint(-3, 4, (800,), generator=g)
    rows, columns = torch.meshgrid(torch.arange(12.0) - 5.5, torch.arange(12.0) - 5.5, indexing="ij")
    kinds = [rows.abs() < 1.5, columns.abs() < 1.5, (rows - columns).abs() < 1.5, (rows + columns).abs() < 1.5]
    shapes = torch.stack(kinds).float()
    images = torch.stack([torch.roll(shapes[k], s, dims=0) for k, s in zip(labels, shifts.tolist(), strict=True)])
    images = 0.5 * (images - 0.25) / 0.43 + 0.9 * torch.randn(images.shape, generator=g)
    images = images.unsqueeze(1)
    return Splits(
        train=TensorLoader(images[:640], labels[:640], batch_size=batch_size, shuffle=True),
        val=TensorLoader(images[640:], labels[640:], batch_size=80),
    )
