import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import forge
from forge.data import Splits


class Pictures(Dataset):
    def __init__(self, images, labels, augment: bool):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        if self.augment:
            image = image + 0.1 * torch.randn(image.shape)
        return image, self.labels[i]


class Task(forge.TaskModule):
    """To which side a picture becomes brighter: right, left, down or up."""

    def __init__(self, width: int = 12, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(9 * width, 4))

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(89)
    y = torch.randint(4, (700,), generator=g)
    ramp = torch.linspace(-1.5, 1.5, 12).expand(12, 12)
    x = torch.stack([ramp, -ramp, ramp.T, -ramp.T])[y] + torch.randn(700, 12, 12, generator=g)
    x = ((x - x.mean()) / x.std()).unsqueeze(1)
    return Splits(
        train=DataLoader(Pictures(x[:560], y[:560], augment=True), batch_size=32, shuffle=True),
        val=DataLoader(Pictures(x[560:], y[560:], augment=False), batch_size=35),
    )
