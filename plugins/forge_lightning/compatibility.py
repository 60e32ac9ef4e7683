"""What of a LightningModule is carried over: what it defines itself, and what is refused or warned of by name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from forge.errors import TaskError

PACKAGES = ("lightning", "pytorch_lightning")

REFUSED = {
    "optimizer_step": "A warm-up belongs into a schedule that configure_optimizers returns with interval 'step'; "
    "anything else into a plugin that wraps or owns forge_optimizer_step.",
    "optimizer_zero_grad": "forge drops gradients itself after every update; remove it.",
    "backward": "Write a plugin that wraps or owns forge_backward.",
    "configure_sharded_model": "Rename it to configure_model, as Lightning asks for too.",
}
"""Methods that change how a step is made: to run without them would be to train something else."""
NOT_CALLED = {
    "configure_callbacks": "plugins do what callbacks do: early_stop, checkpoint, progress, ...",
    "on_before_zero_grad": "forge drops gradients right after the optimizer's step",
    "on_validation_model_zero_grad": "gradients are gone by then",
    "on_validation_model_eval": "forge puts the model into evaluation mode",
    "on_validation_model_train": "forge puts every layer back into the mode it had",
    "on_test_model_eval": "forge puts the model into evaluation mode",
    "on_test_model_train": "forge puts every layer back into the mode it had",
    "on_predict_model_eval": "forge puts the model into evaluation mode",
}
"""Methods that are warned of, and not called."""
MANUAL = (
    "{name} has automatic_optimization = False: it calls backward and step itself, and forge does that. "
    "Write it as a forge.TaskModule instead: configure_optimizers returns a dict of optimizers by name, "
    "training_step(batch, name) returns the loss of the one whose turn it is, and takes_turn(name, update) says who "
    "trains in which update (see docs/from-lightning.md)."
)


def defines(thing: Any, method: str) -> bool:
    """Whether an object, rather than Lightning's base class, defines a method."""
    if thing is None:
        return False
    kind = next((cls for cls in type(thing).__mro__ if method in vars(cls)), None)
    return method in vars(thing) or (kind is not None and kind not in _bases(type(thing)))


def _bases(kind: type) -> tuple[type, ...]:
    """Lightning's own LightningModule or LightningDataModule with all that is behind it; without Lightning, torch's."""
    for cls in kind.__mro__:
        if cls.__module__.partition(".")[0] in PACKAGES and cls.__name__ in ("LightningModule", "LightningDataModule"):
            return cls.__mro__
    return nn.Module.__mro__


def check(module: Any) -> None:
    """Refuse what cannot run under forge, and warn of what is not called."""
    name, step = type(module).__name__, getattr(module, "training_step", None)
    if isinstance(module, type):
        raise TaskError(f"Got the class {module.__name__}; pass an instance: LightningAdapter({module.__name__}()).")
    if not isinstance(module, nn.Module) or not callable(step):
        raise TaskError(f"LightningAdapter got {name}, which is no LightningModule: it has no training_step.")
    if getattr(module, "automatic_optimization", True) is False:
        raise TaskError(MANUAL.format(name=name))
    for method, advice in REFUSED.items():
        if defines(module, method):
            raise TaskError(f"{name} overrides {method}, which forge does not call. {advice}")
    if "dataloader_iter" in inspect.signature(step).parameters:
        raise TaskError(f"{name}.training_step takes dataloader_iter; forge hands it batches. Take (batch, batch_idx).")
    for method, reason in NOT_CALLED.items():
        if defines(module, method):
            warnings.warn(f"{name}.{method} is not called: {reason}.", stacklevel=4)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call with as many of the arguments as it takes: batch_idx and dataloader_idx may be left out of a signature."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function(*arguments)
    takes = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return function(*arguments[:takes])
