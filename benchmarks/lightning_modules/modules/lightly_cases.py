"""lightly."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import classes, loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("lightly")


def lightly_linear() -> Any:
    """LinearClassifier, the module of its benchmarks."""
    from lightly.utils.benchmarking import LinearClassifier
    from torch import nn

    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 16), nn.BatchNorm1d(16))
    module = LinearClassifier(backbone, batch_size_per_device=8, feature_dim=16, num_classes=5, lr=0.1, topk=(1,))
    train = loader(numbers(48, 3, 8, 8), classes(5, 48))
    return module, train, loader(numbers(16, 3, 8, 8, seed=1), classes(5, 16, seed=1))
