"""forge: a PyTorch training framework. One readable step rhythm; plugins that compose bit for bit.

::

    class Classifier(forge.TaskModule): ...

    trainer = forge.Trainer(max_epochs=10, seed=42)
    result = trainer.fit(Classifier(), train_loader, val_loader)

Names load on first use, so that `import forge` (and `forge --help`) does not import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge.version import __version__ as __version__

if TYPE_CHECKING:
    from forge_doctor.doctor import doctor
    from forge_doctor.layer_outputs import features
    from forge_ship.export import export
    from forge_sweep.sweep import sweep

    from forge import data, testing, tuning
    from forge.checkpoint import load_weights
    from forge.config import load_recipe
    from forge.contract.hooks import hookimpl
    from forge.contract.plugin import Plugin, on
    from forge.contract.run import Run
    from forge.contract.step import Step
    from forge.contract.task import TaskModule
    from forge.distributed.positions import positions
    from forge.engine.trainer import FitResult, Trainer
    from forge.errors import (
        CheckpointError,
        DataError,
        DeterminismError,
        ForgeError,
        Interrupted,
        NonFiniteError,
        RecipeError,
        StackError,
        TaskError,
    )
    from forge.metrics.media import Embedding, Histogram, Image, Text
    from forge.progress import Interval
    from forge.rng import seed
    from forge.runs.trained_task import load
    from forge_lightning import LightningAdapter


_HOME = {
    "CheckpointError": "forge.errors",
    "DataError": "forge.errors",
    "DeterminismError": "forge.errors",
    "Embedding": "forge.metrics.media",
    "FitResult": "forge.engine.trainer",
    "ForgeError": "forge.errors",
    "Histogram": "forge.metrics.media",
    "Image": "forge.metrics.media",
    "Interrupted": "forge.errors",
    "Interval": "forge.progress",
    "LightningAdapter": "forge_lightning",
    "NonFiniteError": "forge.errors",
    "Plugin": "forge.contract.plugin",
    "RecipeError": "forge.errors",
    "Run": "forge.contract.run",
    "StackError": "forge.errors",
    "Step": "forge.contract.step",
    "TaskError": "forge.errors",
    "TaskModule": "forge.contract.task",
    "Text": "forge.metrics.media",
    "Trainer": "forge.engine.trainer",
    "doctor": "forge_doctor.doctor",
    "export": "forge_ship.export",
    "features": "forge_doctor.layer_outputs",
    "hookimpl": "forge.contract.hooks",
    "load": "forge.runs.trained_task",
    "load_recipe": "forge.config",
    "load_weights": "forge.checkpoint",
    "on": "forge.contract.plugin",
    "positions": "forge.distributed.positions",
    "seed": "forge.rng",
    "sweep": "forge_sweep.sweep",
}

__all__ = [
    "CheckpointError",
    "DataError",
    "DeterminismError",
    "Embedding",
    "FitResult",
    "ForgeError",
    "Histogram",
    "Image",
    "Interrupted",
    "Interval",
    "LightningAdapter",
    "NonFiniteError",
    "Plugin",
    "RecipeError",
    "Run",
    "StackError",
    "Step",
    "TaskError",
    "TaskModule",
    "Text",
    "Trainer",
    "data",
    "doctor",
    "export",
    "features",
    "hookimpl",
    "load",
    "load_recipe",
    "load_weights",
    "on",
    "positions",
    "seed",
    "sweep",
    "testing",
    "tuning",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in ("data", "testing", "tuning"):
        value = import_module(f"forge.{name}")
    else:
        raise AttributeError(f"module 'forge' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if "torch" in sys.modules:
    import_module("forge.rng")  # sees from now on which weights are drawn before a seed is set
