"""lightning-bolts: LogisticRegression."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import classes, loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("lightning-bolts")


def make() -> Any:
    from pl_bolts.models.regression import LogisticRegression

    module = LogisticRegression(input_dim=8, num_classes=4, learning_rate=0.05)
    return module, loader(numbers(48, 8), classes(4, 48)), loader(numbers(16, 8, seed=1), classes(4, 16, seed=1))
