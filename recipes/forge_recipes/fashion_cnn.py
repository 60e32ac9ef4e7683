"""A small convolutional network on FashionMNIST with augmentation, a one-cycle schedule and averaged weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import forge
from forge.errors import TaskError
from forge_recipes.fashion_mnist import CLASSES, MEAN, STD
from forge_recipes.looks import Looks

Batch = tuple[Tensor, Tensor]


class FashionCNN(forge.TaskModule):
    """Stages of 3 × 3 convolutions with max-pooling between them; `depths` counts the residual ones of each stage.

    Training images are flipped and shifted by up to `shift` pixels, drawn on their device. AdamW runs one cycle of the
    learning rate: up to `lr` in the share `warmup` of the run, then down to 0.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (32, 64, 128),
        depths: tuple[int, ...] = (0, 0, 1),
        lr: float = 6e-3,
        warmup: float = 0.25,
        weight_decay: float = 0.05,
        smoothing: float = 0.05,
        dropout: float = 0.2,
        shift: int = 1,
        flip: bool = True,
    ):
        super().__init__()
        if len(widths) != len(depths):
            raise TaskError(f"fashion_cnn: widths={widths} and depths={depths} must have the same length.")
        self.lr, self.warmup, self.weight_decay = lr, warmup, weight_decay
        self.smoothing, self.shift, self.flip = smoothing, shift, flip
        layers: list[nn.Module] = []
        for inside, outside, depth in zip((1, *widths), widths, depths, strict=False):
            layers += [nn.MaxPool2d(2)] if layers else []
            layers += [Convolution(inside, outside), *(Residual(outside) for _ in range(depth))]
        self.body = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(widths[-1], 10))
        self.to(memory_format=torch.channels_last)
        self.looks = Looks(CLASSES, MEAN, STD)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        return self.body(images.contiguous(memory_format=torch.channels_last))

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(moved(images, self.shift, self.flip))
        loss = F.cross_entropy(logits, labels, label_smoothing=self.smoothing)
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(images)
        hidden = self.features(images[: self.looks.points]) if self.looks.begins() else None
        if not self.is_padding:
            self.looks.add(images, labels, logits, hidden)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        assert self.trainer is not None
        return self.looks.finish(self.trainer.env)

    def predict_step(self, batch: Batch) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, OneCycleLR]:
        assert self.trainer is not None
        fused = next(self.parameters()).is_cuda
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay, fused=fused)
        updates = self.trainer.planned_updates
        if updates is None:
            raise TaskError("fashion_cnn: one cycle needs the length of the run. Set max_epochs or max_updates.")
        # betas stay fixed: a CUDA graph holds them as constants
        cycle = OneCycleLR(optimizer, self.lr, updates, pct_start=self.warmup, cycle_momentum=False)
        return optimizer, cycle


class Convolution(nn.Sequential):
    """3 × 3, batch norm, ReLU."""

    def __init__(self, inside: int, outside: int):
        super().__init__(nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU())


class Residual(nn.Module):
    """A convolution, added to its input."""

    def __init__(self, width: int):
        super().__init__()
        self.convolution = Convolution(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(x)


def moved(images: Tensor, shift: int, flip: bool) -> Tensor:
    """Shift each image by up to `shift` pixels each way, and flip one in two; fill the border with the background.

    This is one gather for the whole batch. Random numbers come from the images' device, so a CUDA graph can capture it,
    and a resumed run draws the same.
    """
    count, _, height, width = images.shape
    device = images.device
    below, beside = torch.randint(-shift, shift + 1, (2, count, 1), device=device)
    rows = torch.arange(height, device=device) + below
    columns = torch.arange(width, device=device)
    if flip:
        columns = torch.where(torch.rand(count, 1, device=device) < 0.5, width - 1 - columns, columns)
    columns = columns + beside
    out = ((rows < 0) | (rows >= height)).unsqueeze(2) | ((columns < 0) | (columns >= width)).unsqueeze(1)
    places = rows.clamp(0, height - 1).unsqueeze(2) * width + columns.clamp(0, width - 1).unsqueeze(1)
    taken = images.flatten(2).gather(2, places.flatten(1).unsqueeze(1).expand(-1, images.size(1), -1))
    return taken.view_as(images).masked_fill(out.unsqueeze(1), -MEAN / STD)
