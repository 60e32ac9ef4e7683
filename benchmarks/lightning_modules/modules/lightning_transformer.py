"""Lightning's own demo of a transformer."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("lightning")


def make() -> Any:
    from lightning.pytorch.demos.transformer import LightningTransformer
    from torch.utils.data import DataLoader

    from benchmarks.lightning_modules.draw import classes

    words = classes(20, 24, 9)
    return LightningTransformer(20), DataLoader([(line[:-1], line[1:]) for line in words], batch_size=4), None
