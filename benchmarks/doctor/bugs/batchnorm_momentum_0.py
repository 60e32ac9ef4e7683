import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


def conv_bn(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs, momentum=0.0),
        nn.ReLU(),
    )


class Task(forge.TaskModule):
    """Count the bars in a picture, from one to five."""

    def __init__(self, width: int = 16, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.features = nn.Sequential(conv_bn(1, width), conv_bn(width, width, 2), conv_bn(width, 2 * width, 2))
        self.head = nn.Linear(2 * width * 4 * 4, 5)

    def forward(self, images):
        return self.head(self.features(images).flatten(1))

    def training_step(self, batch):
        images, count = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, count), "accuracy": (logits.argmax(1) == count).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(38)
    count = torch.randint(5, (900,), generator=g)
    images = torch.zeros(900, 16, 16)
    for image, bars in zip(images, (count + 1).tolist(), strict=True):
        image[:, torch.randperm(8, generator=g)[:bars] * 2] = 2.0
    images = images - 0.75 + 0.5 * torch.randn(images.shape, generator=g)
    images = images.unsqueeze(1)
    return Splits(
        train=TensorLoader(images[:720], count[:720], batch_size=batch_size, shuffle=True),
        val=TensorLoader(images[720:], count[720:], batch_size=60),
    )
