"""torchgeo: ClassificationTask with a ResNet."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import classes, loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("torchgeo")


def make() -> Any:
    from torchgeo.trainers import ClassificationTask

    module = ClassificationTask(model="resnet18", weights=None, in_channels=3, num_classes=4, lr=1e-3, patience=1)
    train = loader(image=numbers(24, 3, 32, 32), label=classes(4, 24))
    return module, train, loader(image=numbers(8, 3, 32, 32, seed=1), label=classes(4, 8, seed=1))
