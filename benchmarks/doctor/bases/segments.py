import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import forge
from forge.data import Splits


class Scenes(Dataset):
    """A disc and a square on a dark ground, and the kind of every pixel."""

    def __init__(self, count: int, seed: int, augment: bool):
        g = torch.Generator().manual_seed(seed)
        rows, columns = torch.arange(16).view(1, 16, 1), torch.arange(16).view(1, 1, 16)
        disc, square = torch.randint(3, 13, (2, 2, count, 1, 1), generator=g)
        self.masks = ((rows - disc[0]) ** 2 + (columns - disc[1]) ** 2 <= 12).long()
        self.masks[torch.maximum((rows - square[0]).abs(), (columns - square[1]).abs()) <= 2] = 2
        noise = 0.4 * torch.randn(count, 16, 16, generator=g)
        self.images = (torch.tensor([-0.7, 0.8, 1.6])[self.masks] + noise).unsqueeze(1)
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image, mask = self.images[i], self.masks[i]
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(-1)
            mask = mask.flip(-1)
        return image, mask


class Task(forge.TaskModule):
    """Label every pixel as ground, disc or square."""

    def __init__(self, width: int = 12, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(width, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.out = nn.Conv2d(24 + width, 3, 3, padding=1)

    def forward(self, image):
        top = self.down(image)
        deep = F.interpolate(self.deep(F.max_pool2d(top, 2)), scale_factor=2)
        return self.out(torch.cat([top, deep], 1))

    def training_step(self, batch):
        image, mask = batch
        logits = self(image)
        return {"loss": F.cross_entropy(logits, mask), "accuracy": (logits.argmax(1) == mask).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    return Splits(
        train=DataLoader(Scenes(400, 1, augment=True), batch_size=20, shuffle=True),
        val=DataLoader(Scenes(100, 2, augment=False), batch_size=20),
    )
