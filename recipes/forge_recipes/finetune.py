"""Fine-tuning: torchvision's ResNet-18 with a new head, thawed from the top, with smaller rates for lower layers."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge

logger = logging.getLogger("forge")

Batch = tuple[Tensor, Tensor]

PARTS = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")
"""The backbone from the bottom to the top."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of ImageNet's colours, on which the backbone was trained."""


class Finetune(forge.TaskModule):
    """A pretrained backbone and a new linear head; the plugin `freeze` selects what to freeze.

    `weights` are those of the backbone: true downloads torchvision's of ImageNet (random ones, with a warning, if that
    fails), false draws random ones, and a path is a file of ResNet-18 weights. Each part below the head learns at
    `decay` times the rate of the one above it.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        weights: bool | str = True,
        classes: int = 10,
        size: int = 32,
        lr: float = 3e-3,
        decay: float = 0.5,
        weight_decay: float = 0.01,
    ):
        super().__init__()
        self.size, self.lr, self.decay, self.weight_decay = size, lr, decay, weight_decay
        self.backbone = resnet18(weights)
        self.head = nn.Linear(512, classes)
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1), persistent=False)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(self.as_photographs(images)))

    def as_photographs(self, images: Tensor) -> Tensor:
        """Convert grey images (N, H, W) between 0 and 1 for the backbone: larger, in three colours, normalised."""
        large = F.interpolate(images.unsqueeze(1), size=(self.size, self.size), mode="bilinear", align_corners=False)
        return ((large - self.mean) / self.std).contiguous(memory_format=torch.channels_last)

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}

    validation_step = training_step

    def predict_step(self, batch: Batch) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # including frozen parts: the optimizer skips them without gradients, and they are thawed later
        groups: list[dict[str, Any]] = [{"name": "head", "params": list(self.head.parameters()), "lr": self.lr}]
        for below, part in enumerate(reversed(PARTS), start=1):
            parameters = list(self.backbone.get_submodule(part).parameters())
            groups.append({"name": part, "params": parameters, "lr": self.lr * self.decay**below})
        return torch.optim.AdamW(groups, lr=self.lr, weight_decay=self.weight_decay)


def resnet18(weights: bool | str) -> nn.Module:
    """Return torchvision's ResNet-18 without its last layer."""
    from torchvision.models import ResNet18_Weights
    from torchvision.models import resnet18 as make

    backbone = make()
    if isinstance(weights, str):
        forge.load_weights(backbone, weights)
    elif weights:
        try:
            backbone.load_state_dict(ResNet18_Weights.DEFAULT.get_state_dict(progress=False, weights_only=True))
        except OSError as error:
            logger.warning(
                "finetune: the weights of ResNet-18 cannot be downloaded (%s): it starts with random ones.", error
            )
    backbone.fc = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    return backbone
