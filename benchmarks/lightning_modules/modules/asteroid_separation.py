"""asteroid: System, its module for any separator."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import classes, loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("asteroid")


def make() -> Any:
    import torch
    from asteroid.engine.system import System
    from asteroid.losses import PITLossWrapper, pairwise_neg_sisdr
    from asteroid.models import ConvTasNet

    model = ConvTasNet(n_src=2, n_filters=16, n_blocks=2, n_repeats=1, bn_chan=8, hid_chan=16, skip_chan=8)
    train = loader(numbers(24, 1, 800), numbers(24, 2, 800, seed=1))
    val = loader(numbers(8, 1, 800, seed=2), numbers(8, 2, 800, seed=3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    system = System(model, optimizer, PITLossWrapper(pairwise_neg_sisdr, pit_from="pw_mtx"), train, val, scheduler)
    return system, train, val
