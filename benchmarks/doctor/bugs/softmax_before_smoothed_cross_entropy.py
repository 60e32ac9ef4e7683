import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class ShapeNet(nn.Module):
    def __init__(self, classes: int = 4):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, classes), nn.Softmax(dim=1))

    def forward(self, images):
        return self.classifier(self.features(images))


class Task(forge.TaskModule):
    """Tell four drawn shapes apart."""

    def __init__(self, lr: float = 2e-3, smoothing: float = 0.1):
        super().__init__()
        self.lr = lr
        self.smoothing = smoothing
        self.net = ShapeNet()

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch):
        images, labels = batch
        outputs = self(images)
        loss = F.cross_entropy(outputs, labels, label_smoothing=self.smoothing)
        return {"loss": loss, "accuracy": (outputs.argmax(1) == labels).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def draw(kind: int, row: int, column: int, size: int) -> torch.Tensor:
    image = torch.zeros(16, 16)
    patch = image[row : row + size, column : column + size]
    if kind == 0:
        patch[0], patch[-1], patch[:, 0], patch[:, -1] = 1, 1, 1, 1
    elif kind == 1:
        patch[size // 2], patch[:, size // 2] = 1, 1
    elif kind == 2:
        patch += torch.eye(size)
    else:
        patch[::2] = 1
    return image


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(11)
    labels = torch.randint(4, (1000,), generator=g)
    corners = torch.randint(0, 8, (1000, 2), generator=g)
    sizes = torch.randint(5, 9, (1000,), generator=g)
    plans = torch.cat([labels[:, None], corners, sizes[:, None]], dim=1).tolist()
    images = torch.stack([draw(*plan) for plan in plans])
    images = (images - 0.15) / 0.35 + 0.5 * torch.randn(images.shape, generator=g)
    images = images.unsqueeze(1)
    return Splits(
        train=TensorLoader(images[:800], labels[:800], batch_size=batch_size, shuffle=True),
        val=TensorLoader(images[800:], labels[800:], batch_size=100),
    )
