"""careamics."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("careamics")


def careamics_unet() -> Any:
    """FCNModule, a U-Net that denoises."""
    from careamics.lightning import FCNModule

    module = FCNModule(
        {
            "algorithm": "care",
            "loss": "mae",
            "model": {"architecture": "UNet", "conv_dims": 2, "depth": 1, "num_channels_init": 8},
            "optimizer": {"name": "Adam", "parameters": {"lr": 1e-2}},
            "lr_scheduler": {"name": "ReduceLROnPlateau", "parameters": {"patience": 0}},
        }
    )
    train = loader(numbers(16, 1, 16, 16), numbers(16, 1, 16, 16, seed=1), batch_size=4)
    return module, train, loader(numbers(8, 1, 16, 16, seed=2), numbers(8, 1, 16, 16, seed=3), batch_size=4)
