"""torchgeo: BYOLTask, with augmentations and a moving average of the weights."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("torchgeo")


def make() -> Any:
    from torchgeo.trainers import BYOLTask

    module = BYOLTask(model="resnet18", weights=None, in_channels=3, lr=1e-3)
    return module, loader(image=numbers(16, 3, 32, 32).sigmoid(), batch_size=4), None
