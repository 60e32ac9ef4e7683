"""torchgeo."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import classes, loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("torchgeo")


def torchgeo_classification() -> Any:
    """ClassificationTask with a ResNet."""
    from torchgeo.trainers import ClassificationTask

    module = ClassificationTask(model="resnet18", weights=None, in_channels=3, num_classes=4, lr=1e-3, patience=1)
    train = loader(image=numbers(24, 3, 32, 32), label=classes(4, 24))
    return module, train, loader(image=numbers(8, 3, 32, 32, seed=1), label=classes(4, 8, seed=1))


def torchgeo_regression() -> Any:
    """RegressionTask."""
    from torchgeo.trainers import RegressionTask

    module = RegressionTask(model="resnet18", weights=None, in_channels=3, lr=1e-3)
    train = loader(image=numbers(24, 3, 32, 32), label=numbers(24))
    return module, train, loader(image=numbers(8, 3, 32, 32, seed=1), label=numbers(8, seed=1))


def torchgeo_segmentation() -> Any:
    """SemanticSegmentationTask with a U-Net of segmentation-models."""
    from torchgeo.trainers import SemanticSegmentationTask

    module = SemanticSegmentationTask(
        model="unet", backbone="resnet18", weights=None, in_channels=3, num_classes=3, task="multiclass", lr=1e-3
    )
    train = loader(image=numbers(16, 3, 32, 32), mask=classes(3, 16, 32, 32), batch_size=4)
    return module, train, loader(image=numbers(4, 3, 32, 32, seed=1), mask=classes(3, 4, 32, 32, seed=1), batch_size=4)
