"""Regressions of lightning-uq-box."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("lightning-uq-box")


def uq_deterministic() -> Any:
    import torch

    return _module("DeterministicRegression", 1, torch.nn.MSELoss())


def uq_mc_dropout() -> Any:
    from lightning_uq_box.uq_methods.loss_functions import NLL

    return _module("MCDropoutRegression", 2, 3, NLL(), burnin_epochs=1)


def uq_mve() -> Any:
    return _module("MVERegression", 2, burnin_epochs=1)


def _module(name: str, outputs: int, *arguments: Any, **options: Any) -> Any:
    from functools import partial

    import torch
    from lightning_uq_box import uq_methods
    from lightning_uq_box.models import MLP

    model = MLP(n_inputs=3, n_hidden=[16, 16], n_outputs=outputs, dropout_p=0.2)
    optimizer = partial(torch.optim.Adam, lr=1e-2)
    module = getattr(uq_methods, name)(model, *arguments, optimizer=optimizer, **options)
    train = loader(input=numbers(48, 3), target=numbers(48, 1, seed=2))
    return module, train, loader(input=numbers(16, 3, seed=1), target=numbers(16, 1, seed=3))
