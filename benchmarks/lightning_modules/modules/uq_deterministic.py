"""lightning-uq-box: DeterministicRegression."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("lightning-uq-box")


def make() -> Any:
    from functools import partial

    import torch
    from lightning_uq_box.models import MLP
    from lightning_uq_box.uq_methods import DeterministicRegression

    model = MLP(n_inputs=3, n_hidden=[16, 16], n_outputs=1, dropout_p=0.2)
    optimizer = partial(torch.optim.Adam, lr=1e-2)
    module = DeterministicRegression(model, torch.nn.MSELoss(), optimizer=optimizer)
    train = loader(input=numbers(48, 3), target=numbers(48, 1, seed=2))
    return module, train, loader(input=numbers(16, 3, seed=1), target=numbers(16, 1, seed=3))
