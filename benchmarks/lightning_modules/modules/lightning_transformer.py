"""Lightning's own demo of a transformer."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("lightning")


def make() -> Any:
    from lightning.pytorch.demos.transformer import LightningTransformer
    from torch.utils.data import DataLoader, TensorDataset

    from benchmarks.lightning_modules.draw import classes

    words = classes(20, 24, 9)
    data = TensorDataset(words[:, :-1], words[:, 1:])
    return LightningTransformer(20), DataLoader(data, batch_size=4), None
