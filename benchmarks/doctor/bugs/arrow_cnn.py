import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, images, labels, augment: bool):
        self.images = images
        self.labels = labels
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        if self.augment:
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
            image = image + 0.1 * torch.randn(image.shape)
        return image, self.labels[i]


class Task(forge.TaskModule):
    """The direction in which an arrow points: right, left, up or down."""

    def __init__(self, width: int = 12, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 9, 4),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(89)
    n = 700
    labels = torch.randint(4, (n,), generator=g)
    images = torch.zeros(n, 1, 12, 12)
    for i, k in enumerate(labels.tolist()):
        row, size = int(torch.randint(3, 9, (1,), generator=g)), int(torch.randint(2, 4, (1,), generator=g))
        picture = torch.zeros(12, 12)
        picture[row, 2:10] = 1.0
        for d in range(size):
            picture[max(row - d, 0), 9 - d] = picture[min(row + d, 11), 9 - d] = 1.0
        images[i, 0] = [picture, picture.flip(1), picture.T.flip(0), picture.T][k]
    images = images + 0.25 * torch.randn(images.shape, generator=g)
    images = (images - images.mean()) / images.std()
    return Splits(
        train=DataLoader(Pictures(images[:560], labels[:560], True), batch_size=32, shuffle=True),
        val=DataLoader(Pictures(images[560:], labels[560:], False), batch_size=32),
    )
