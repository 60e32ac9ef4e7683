"""torchgeo: SimCLRTask."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("torchgeo")


def make() -> Any:
    from torchgeo.trainers import SimCLRTask

    module = SimCLRTask(model="resnet18", weights=None, in_channels=3, lr=1e-3, size=32, hidden_dim=16, output_dim=8)
    return module, loader(image=numbers(16, 3, 32, 32).sigmoid(), batch_size=4), None
