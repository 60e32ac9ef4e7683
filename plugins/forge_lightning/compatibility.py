"""Which methods a LightningModule defines itself, what is refused, and how its methods are called."""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from forge.errors import TaskError

logger = logging.getLogger("forge")

PACKAGES = ("lightning", "pytorch_lightning")

REFUSED = {
    "configure_sharded_model": "Rename it to configure_model, as Lightning requires too.",
}
"""Methods that Lightning refuses too."""


def defines(thing: Any, method: str) -> bool:
    """Whether an object defines a method itself, rather than Lightning's base class."""
    if thing is None:
        return False
    found = next((vars(cls)[method] for cls in type(thing).__mro__ if method in vars(cls)), None)
    if method in vars(thing):
        return True
    return found is not None and all(vars(base).get(method) is not found for base in _bases(type(thing)))


def _bases(kind: type) -> tuple[type, ...]:
    """Return the bases of Lightning's LightningModule or LightningDataModule; without Lightning, torch's."""
    for cls in kind.__mro__:
        if cls.__module__.partition(".")[0] in PACKAGES and cls.__name__ in ("LightningModule", "LightningDataModule"):
            return cls.__mro__
    return nn.Module.__mro__


def check(module: Any) -> None:
    """Raise TaskError for a module that cannot run under forge."""
    name, step = type(module).__name__, getattr(module, "training_step", None)
    if isinstance(module, type):
        raise TaskError(f"Got the class {module.__name__}; pass an instance: LightningAdapter({module.__name__}()).")
    if not isinstance(module, nn.Module) or not callable(step):
        raise TaskError(f"LightningAdapter got {name}, which is not a LightningModule: it has no training_step.")
    for method, advice in REFUSED.items():
        if defines(module, method):
            raise TaskError(f"{name} overrides {method}, which forge does not call. {advice}")
    parameters = inspect.signature(step).parameters
    if "dataloader_iter" in parameters:
        raise TaskError(f"{name}.training_step takes dataloader_iter; forge passes batches. Take (batch, batch_idx).")
    if "optimizer_idx" in parameters:
        raise TaskError(
            f"{name}.training_step takes optimizer_idx, which Lightning 2 refuses too. Set automatic_optimization = "
            "False, and step the optimizers of self.optimizers()."
        )


def refuse_removed(trainer: Any) -> None:
    """Refuse hooks that Lightning has removed, which would never be called: by its own check, for a TrainerProxy."""
    for package in trainer.packages:
        validator = importlib.import_module(f"{package}.trainer.configuration_validator")
        check_loops = getattr(validator, "_verify_loop_configurations", None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if check_loops is not None:
                    check_loops(trainer)
            except NotImplementedError as error:
                raise TaskError(str(error)) from error
            except Exception as error:  # what Lightning cannot run otherwise, forge judges itself
                logger.debug("Lightning's own check of the module: %s", error)


def is_lightning(part: Any) -> bool:
    """Whether an object is one of Lightning's LightningModules."""
    mro = type(part).__mro__
    return any(cls.__name__ == "LightningModule" and cls.__module__.partition(".")[0] in PACKAGES for cls in mro)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call with as many arguments as the function accepts: a signature may omit batch_idx and dataloader_idx."""
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        takes = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        arguments = arguments[:takes]
    return function(*arguments)
