import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn

CLASSES = 3


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class SmallUNet(nn.Module):
    def __init__(self, width: int = 12):
        super().__init__()
        self.down = block(1, width)
        self.middle = block(width, 2 * width)
        self.up = block(3 * width, width)
        self.out = nn.Conv2d(width, CLASSES, 1)

    def forward(self, image):
        top = self.down(image)
        bottom = self.middle(F.max_pool2d(top, 2))
        bottom = F.interpolate(bottom, scale_factor=2, mode="nearest")
        return self.out(self.up(torch.cat([top, bottom], dim=1)))


class Task(forge.TaskModule):
    """Label every pixel as background, disc or square."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = SmallUNet()

    def forward(self, image):
        return self.net(image)

    def training_step(self, batch):
        image, mask = batch
        logits = self(image).view(-1, CLASSES)
        pixels = mask.view(-1)
        return {
            "loss": F.cross_entropy(logits, pixels),
            "pixel_accuracy": (logits.argmax(1) == pixels).float().mean(),
        }

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def scenes(count: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(16).view(1, 16, 1)
    columns = torch.arange(16).view(1, 1, 16)
    disc = torch.randint(3, 13, (2, count, 1, 1), generator=g)
    square = torch.randint(3, 13, (2, count, 1, 1), generator=g)
    inside_disc = (rows - disc[0]) ** 2 + (columns - disc[1]) ** 2 <= 12
    inside_square = torch.maximum((rows - square[0]).abs(), (columns - square[1]).abs()) <= 2
    mask = torch.zeros(count, 16, 16, dtype=torch.long)
    mask[inside_disc] = 1
    mask[inside_square] = 2
    brightness = torch.tensor([-0.7, 0.8, 1.6])[mask]
    image = brightness + 0.4 * torch.randn(count, 16, 16, generator=g)
    return image.unsqueeze(1), mask


def data(batch_size: int = 20) -> Splits:
    g = torch.Generator().manual_seed(17)
    train, val = scenes(400, g), scenes(100, g)
    return Splits(
        train=TensorLoader(*train, batch_size=batch_size, shuffle=True),
        val=TensorLoader(*val, batch_size=50),
    )
