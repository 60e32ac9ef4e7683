"""Run an example's Lightning version on forge's order of the data and with its random numbers.

Lightning draws orders and noise from one global generator; forge draws an order from (seed, epoch), seeds the global
generators when training begins, and restores them after a validation. With these three aligned, what remains between
two versions of an example is what they compute.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from forge.data import Bucketed, Loader
from forge.rng import RNGState, seed_all

CPU = torch.device("cpu")


def run_like_forge(script: Path, monkeypatch: pytest.MonkeyPatch, seed: int | None) -> dict[str, Any]:
    """Run a script of Lightning's, and return its variables. `seed`: that of forge's Trainer."""
    lightning = pytest.importorskip("lightning")

    class LikeForge(lightning.Callback):
        """Seeds and restores the generators when forge does, and tells loaders their epoch."""

        def on_train_start(self, trainer: Any, module: Any) -> None:
            if seed is not None:
                seed_all(seed)

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if hasattr(trainer.train_dataloader, "set_epoch"):
                trainer.train_dataloader.set_epoch(trainer.current_epoch)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            self.before = RNGState.capture(CPU)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.before.restore(CPU)

    class Trainer(lightning.Trainer):
        def __init__(self, *arguments: Any, callbacks: Any = (), **options: Any):
            super().__init__(*arguments, callbacks=[*callbacks, LikeForge()], accelerator="cpu", **options)

    with monkeypatch.context() as patch:
        patch.setattr(lightning, "Trainer", Trainer)
        patch.setattr("torch.utils.data.DataLoader", loader_like_forge)
        return runpy.run_path(str(script), run_name="__main__")


def loader_like_forge(dataset: Any, batch_size: int | None = 1, **options: Any) -> Any:
    """Return forge's loader if the order is random, else torch's, with a generator that is not the global one."""
    if "batch_sampler" in options:
        return Loader(dataset, **options)
    if options.pop("shuffle", False):
        return Loader(dataset, batch_size, shuffle=True, **options)
    sampler = options.pop("sampler", None)
    if sampler is not None:
        return Loader(dataset, batch_size, sampler=Bucketed(sampler.lengths), **options)
    return DataLoader(dataset, batch_size, generator=torch.Generator(), **options)
