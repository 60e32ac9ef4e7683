"""forge: a PyTorch training framework. One readable step rhythm; plugins that compose bit for bit.

::

    class Classifier(forge.TaskModule): ...

    trainer = forge.Trainer(max_epochs=10, seed=42)
    result = trainer.fit(Classifier(), train_loader, val_loader)

Names load on first use, so that `import forge` (and `forge --help`) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge import data, testing
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
    from forge.hooks import hookimpl
    from forge.lightning import LightningAdapter
    from forge.metrics import Embedding, Histogram, Image, Text
    from forge.plugin import Plugin, on
    from forge.progress import Interval
    from forge.recipe import load_recipe
    from forge.state import load_weights
    from forge.step import Step
    from forge.task import TaskModule
    from forge.trainer import FitResult, Trainer

__version__ = "0.1.0"

_HOME = {
    "CheckpointError": "forge.errors",
    "DataError": "forge.errors",
    "DeterminismError": "forge.errors",
    "Embedding": "forge.metrics",
    "FitResult": "forge.trainer",
    "ForgeError": "forge.errors",
    "Histogram": "forge.metrics",
    "Image": "forge.metrics",
    "Interrupted": "forge.errors",
    "Interval": "forge.progress",
    "LightningAdapter": "forge.lightning",
    "NonFiniteError": "forge.errors",
    "Plugin": "forge.plugin",
    "RecipeError": "forge.errors",
    "StackError": "forge.errors",
    "Step": "forge.step",
    "TaskError": "forge.errors",
    "TaskModule": "forge.task",
    "Text": "forge.metrics",
    "Trainer": "forge.trainer",
    "hookimpl": "forge.hooks",
    "load_recipe": "forge.recipe",
    "load_weights": "forge.state",
    "on": "forge.plugin",
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
    "StackError",
    "Step",
    "TaskError",
    "TaskModule",
    "Text",
    "Trainer",
    "data",
    "hookimpl",
    "load_recipe",
    "load_weights",
    "on",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in ("data", "testing"):
        value = import_module(f"forge.{name}")
    else:
        raise AttributeError(f"module 'forge' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
