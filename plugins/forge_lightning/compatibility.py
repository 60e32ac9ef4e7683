"""Which methods a LightningModule defines itself, and which of them are refused or warned about."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from forge.errors import TaskError

PACKAGES = ("lightning", "pytorch_lightning")

REFUSED = {
    "optimizer_step": "Write a warm-up as a schedule that configure_optimizers returns with interval 'step', "
    "and anything else as a plugin that wraps or owns forge_optimizer_step.",
    "optimizer_zero_grad": "forge drops gradients itself after every update; remove it.",
    "backward": "Write a plugin that wraps or owns forge_backward.",
    "configure_sharded_model": "Rename it to configure_model, as Lightning requires too.",
}
"""Methods that change the step: without them the training would differ."""
NOT_CALLED = {
    "configure_callbacks": "plugins replace callbacks: early_stop, checkpoint, progress, ...",
    "on_before_zero_grad": "forge drops gradients right after the optimizer's step",
    "on_validation_model_zero_grad": "gradients are already dropped",
    "on_validation_model_eval": "forge sets evaluation mode",
    "on_validation_model_train": "forge restores the mode of every layer",
    "on_test_model_eval": "forge sets evaluation mode",
    "on_test_model_train": "forge restores the mode of every layer",
    "on_predict_model_eval": "forge sets evaluation mode",
}
"""Methods that are not called, with a warning."""
MANUAL = (
    "{name} has automatic_optimization = False: it calls backward and step itself, which forge does. "
    "Write it as a forge.TaskModule instead: configure_optimizers returns a dict of optimizers by name, "
    "training_step(batch, name) returns the loss of one of them, and takes_turn(name, update) returns whether it "
    "trains in an update (see docs/from-lightning.md)."
)


def defines(thing: Any, method: str) -> bool:
    """Whether an object defines a method itself, rather than Lightning's base class."""
    if thing is None:
        return False
    kind = next((cls for cls in type(thing).__mro__ if method in vars(cls)), None)
    return method in vars(thing) or (kind is not None and kind not in _bases(type(thing)))


def _bases(kind: type) -> tuple[type, ...]:
    """Return the bases of Lightning's LightningModule or LightningDataModule; without Lightning, torch's."""
    for cls in kind.__mro__:
        if cls.__module__.partition(".")[0] in PACKAGES and cls.__name__ in ("LightningModule", "LightningDataModule"):
            return cls.__mro__
    return nn.Module.__mro__


def check(module: Any) -> None:
    """Raise TaskError for a module that cannot run under forge, and warn about methods that are not called."""
    name, step = type(module).__name__, getattr(module, "training_step", None)
    if isinstance(module, type):
        raise TaskError(f"Got the class {module.__name__}; pass an instance: LightningAdapter({module.__name__}()).")
    if not isinstance(module, nn.Module) or not callable(step):
        raise TaskError(f"LightningAdapter got {name}, which is not a LightningModule: it has no training_step.")
    if getattr(module, "automatic_optimization", True) is False:
        raise TaskError(MANUAL.format(name=name))
    for method, advice in REFUSED.items():
        if defines(module, method):
            raise TaskError(f"{name} overrides {method}, which forge does not call. {advice}")
    if "dataloader_iter" in inspect.signature(step).parameters:
        raise TaskError(f"{name}.training_step takes dataloader_iter; forge passes batches. Take (batch, batch_idx).")
    for method, reason in NOT_CALLED.items():
        if defines(module, method):
            warnings.warn(f"{name}.{method} is not called: {reason}.", stacklevel=4)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call with as many arguments as the function accepts: a signature may omit batch_idx and dataloader_idx."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function(*arguments)
    takes = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return function(*arguments[:takes])
