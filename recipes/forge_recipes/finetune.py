"""Fine-tuning: a ResNet-18 of torchvision's with a new head, thawed from the top, its lower layers at smaller rates."""

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
"""Of the colours of ImageNet, which the backbone has seen."""


class Finetune(forge.TaskModule):
    """A backbone that has seen other pictures, and a linear head for these; what to freeze is the plugin's to say.

    `weights` are those of the backbone: true fetches torchvision's of ImageNet (random ones, with a word in the log,
    where they cannot be fetched), false draws random ones, and a path is a file of a ResNet-18's. Each part below the
    head learns at `decay` times the rate of the one above it.
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
        """Grey images (N, H, W) between 0 and 1 as the backbone knows them: larger, in three colours, normalised."""
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
        # the frozen parts too: what has no gradient is passed over, and they are thawed later
        groups: list[dict[str, Any]] = [{"name": "head", "params": list(self.head.parameters()), "lr": self.lr}]
        for below, part in enumerate(reversed(PARTS), start=1):
            parameters = list(self.backbone.get_submodule(part).parameters())
            groups.append({"name": part, "params": parameters, "lr": self.lr * self.decay**below})
        return torch.optim.AdamW(groups, lr=self.lr, weight_decay=self.weight_decay)


def resnet18(weights: bool | str) -> nn.Module:
    """torchvision's ResNet-18 without its last layer."""
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
                "finetune: the weights of ResNet-18 cannot be fetched (%s): it begins with random ones.", error
            )
    backbone.fc = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    return backbone
