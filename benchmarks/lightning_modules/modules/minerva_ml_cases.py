"""minerva-ml."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import classes, loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("minerva-ml==0.3.8b0", needs=("timm", "torchinfo", "perlin-noise"), alone=True)


def minerva_ml_resnet() -> Any:
    """ResNet1D_8, for time series."""
    from minerva.models.nets.time_series.resnet import ResNet1D_8

    module = ResNet1D_8(input_shape=(6, 60), num_classes=6)
    train = loader(numbers(16, 6, 60), classes(6, 16))
    return module, train, loader(numbers(8, 6, 60, seed=1), classes(6, 8, seed=1))
