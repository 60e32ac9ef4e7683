"""ResNet-18 for small images, without torchvision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge

Batch = tuple[Tensor, Tensor]


class BasicBlock(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.around = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.around(x))


class ResNet18(forge.TaskModule):
    """ResNet-18 with a 3 × 3 stem and no pooling before the first block, as for CIFAR, in channels-last format."""

    def __init__(self, classes: int = 10, channels: int = 3, lr: float = 0.1, weight_decay: float = 5e-4):
        super().__init__()
        self.lr, self.weight_decay = lr, weight_decay
        self.stem = nn.Sequential(nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        blocks = [BasicBlock(a, b, stride) for a, b, first in widths for a, b, stride in ((a, b, first), (b, b, 1))]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images.contiguous(memory_format=torch.channels_last)))
        return self.head(x.mean((2, 3)))

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        fused = next(self.parameters()).is_cuda
        options = {"momentum": 0.9, "nesterov": True, "weight_decay": self.weight_decay, "fused": fused}
        return torch.optim.SGD(self.parameters(), lr=self.lr, **options)
