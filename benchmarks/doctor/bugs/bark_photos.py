import forge
import numpy as np
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Bark(Dataset):
    """Photographs of bark; those for training get noise."""

    def __init__(self, pictures, kinds, augment: bool):
        self.pictures = pictures
        self.kinds = kinds
        self.augment = augment
        self.rng = None

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        picture = self.pictures[i]
        if self.augment:
            if self.rng is None:  # generators cannot always be pickled, so each worker makes its own
                self.rng = np.random.default_rng(2024)
            noise = self.rng.normal(scale=0.2, size=picture.shape).astype(np.float32)
            picture = picture + torch.from_numpy(noise)
        return picture, self.kinds[i]


class Task(forge.TaskModule):
    """Tell trees by their bark."""

    def __init__(self, width: int = 12, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
            nn.Linear(9 * width, 4),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        picture, kind = batch
        logits = self(picture)
        return {"loss": F.cross_entropy(logits, kind), "accuracy": (logits.argmax(1) == kind).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(12)
    kinds = torch.randint(4, (640,), generator=g)
    rows = torch.arange(12.0).view(1, 12, 1) * (0.4 + 0.4 * kinds.view(-1, 1, 1))
    pictures = torch.sin(rows + 6.28 * torch.rand(640, 1, 12, generator=g)) + 0.3 * torch.randn(640, 12, 12, generator=g)
    pictures = pictures.unsqueeze(1)
    return Splits(
        train=DataLoader(Bark(pictures[:512], kinds[:512], augment=True), batch_size=32, shuffle=True, num_workers=2),
        val=DataLoader(Bark(pictures[512:], kinds[512:], augment=False), batch_size=64),
    )
