"""torchgeo: RegressionTask."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("torchgeo")


def make() -> Any:
    from torchgeo.trainers import RegressionTask

    module = RegressionTask(model="resnet18", weights=None, in_channels=3, lr=1e-3)
    train = loader(image=numbers(24, 3, 32, 32), label=numbers(24))
    return module, train, loader(image=numbers(8, 3, 32, 32, seed=1), label=numbers(8, seed=1))
