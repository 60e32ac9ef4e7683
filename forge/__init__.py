"""forge: a PyTorch training framework. One readable step rhythm; plugins that compose bit for bit.

::

    class Classifier(forge.TaskModule): ...

    trainer = forge.Trainer(max_epochs=10, seed=42)
    result = trainer.fit(Classifier(), train_loader, val_loader)

Names load on first use, so that `import forge` (and `forge --help`) does not import torch. Packages around the core add
names of their own (`forge.NAME`) by the entry point `forge.names`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from forge.version import __version__ as __version__

if TYPE_CHECKING:
    from forge import data, testing, tuning
    from forge.checkpoint import Checkpoints, load_weights
    from forge.config.recipe import recipe
    from forge.contract.frozen import adapter, frozen
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
    from forge.runs.group import RunGroup
    from forge.runs.trained_task import load


_HOME = {
    "CheckpointError": "forge.errors",
    "Checkpoints": "forge.checkpoint",
    "DataError": "forge.errors",
    "DeterminismError": "forge.errors",
    "Embedding": "forge.metrics.media",
    "FitResult": "forge.engine.trainer",
    "ForgeError": "forge.errors",
    "Histogram": "forge.metrics.media",
    "Image": "forge.metrics.media",
    "Interrupted": "forge.errors",
    "Interval": "forge.progress",
    "NonFiniteError": "forge.errors",
    "Plugin": "forge.contract.plugin",
    "RecipeError": "forge.errors",
    "Run": "forge.contract.run",
    "RunGroup": "forge.runs.group",
    "StackError": "forge.errors",
    "Step": "forge.contract.step",
    "TaskError": "forge.errors",
    "TaskModule": "forge.contract.task",
    "Text": "forge.metrics.media",
    "Trainer": "forge.engine.trainer",
    "adapter": "forge.contract.frozen",
    "frozen": "forge.contract.frozen",
    "hookimpl": "forge.contract.hooks",
    "load": "forge.runs.trained_task",
    "load_weights": "forge.checkpoint",
    "on": "forge.contract.plugin",
    "positions": "forge.distributed.positions",
    "recipe": "forge.config.recipe",
    "seed": "forge.rng",
}


__all__ = [
    "CheckpointError",
    "Checkpoints",
    "DataError",
    "DeterminismError",
    "Embedding",
    "FitResult",
    "ForgeError",
    "Histogram",
    "Image",
    "Interrupted",
    "Interval",
    "NonFiniteError",
    "Plugin",
    "RecipeError",
    "Run",
    "RunGroup",
    "StackError",
    "Step",
    "TaskError",
    "TaskModule",
    "Text",
    "Trainer",
    "adapter",
    "data",
    "frozen",
    "hookimpl",
    "load",
    "load_weights",
    "on",
    "positions",
    "recipe",
    "seed",
    "testing",
    "tuning",
]
"""The core's public names; `dir(forge)` has those of installed packages too."""
_ROOMS = ("data", "testing", "tuning")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in _ROOMS:
        value = import_module(f"forge.{name}")
    elif name.startswith("_") or find_spec(f"{__name__}.{name}"):  # a module: what imports it asks here first
        raise AttributeError(f"module 'forge' has no attribute {name!r}")
    else:
        value = import_module("forge.registry").public(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The core's public names, and those that installed packages offer."""
    offered = import_module("forge.registry").installed("name")
    return sorted([*__all__, *(name for name in offered if "." not in name)])
