"""Checks at the start and on the first batch: the classic mistakes of PyTorch training, refused by name.

Everything here runs once per fit, before it can cost an hour; nothing here is in the hot path.
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from forge.errors import TaskError
from forge.metrics import check_scalars
from forge.task import STAGE_METHODS, TaskModule, defines

if TYPE_CHECKING:
    from forge.optimizers import Optimizers
    from forge.step import Step

logger = logging.getLogger("forge")

# ---------------------------------------------------------------------------------------------------------------------
# Before anything is built


NOT_LAYERS = frozenset({"_parameters", "_buffers", "_modules", "trainer", "init_args"})
"""Attributes of a module that are nobody's plain list of layers."""


def check_task(task: Any, stages: Mapping[str, Any]) -> None:
    """Refuse what is no task, layers that nobody registered, and stages the task has no method for."""
    if isinstance(task, type):
        made = f"{task.__name__}()"
        raise TaskError(
            f"Got the class {task.__name__}; pass an instance: "
            f"{f'forge.LightningAdapter({made})' if is_lightning(task) else made}."
        )
    if is_lightning(type(task)) and not isinstance(task, TaskModule):
        raise TaskError(
            f"{type(task).__name__} is a LightningModule. Wrap it: fit(forge.LightningAdapter(module), ...) runs it as "
            "it is (docs/from-lightning.md)."
        )
    if not isinstance(task, TaskModule):
        raise TaskError(
            f"{type(task).__name__} is no forge.TaskModule. Subclass it and write training_step and "
            "configure_optimizers; a plain nn.Module can be an attribute of yours."
        )
    for stage, loader in stages.items():
        method = STAGE_METHODS[stage]
        if loader is not None and stage in ("train", "val") and not defines(task, method):
            getattr(task, method)(None)  # the base method raises with what to write
    _refuse_hidden_layers(task)


def is_lightning(kind: type) -> bool:
    """Whether a class is a LightningModule, of whichever package; Lightning is not imported to see."""
    return any(cls.__name__ == "LightningModule" for cls in kind.__mro__)


def _refuse_hidden_layers(task: nn.Module) -> None:
    registered = {id(parameter) for parameter in task.parameters()}
    for prefix, module in task.named_modules():
        for name, value in vars(module).items():
            if name in NOT_LAYERS or name.startswith("_forward"):
                continue
            hidden = [item for item in _trainable(value, depth=3) if not registered.issuperset(_parameter_ids(item))]
            if hidden:
                path = f"{type(task).__name__}.{prefix + '.' if prefix else ''}{name}"
                holder = "dict" if isinstance(value, dict) else type(value).__name__
                better = {"dict": "nn.ModuleDict", "Tensor": "nn.Parameter"}.get(holder, "nn.ModuleList")
                if all(isinstance(item, nn.Parameter) for item in hidden):
                    better = {"dict": "nn.ParameterDict"}.get(holder, "nn.ParameterList")
                raise TaskError(
                    f"{path} is a plain {holder} that hides {len(hidden)} trainable "
                    f"{type(hidden[0]).__name__}{'s' if len(hidden) > 1 else ''}: no optimizer, device move or file "
                    f"would see them. Use {better}, or requires_grad_(False) if they are not to be trained."
                )


def _parameter_ids(item: nn.Module | nn.Parameter) -> set[int]:
    return {id(item)} if isinstance(item, nn.Parameter) else {id(p) for p in item.parameters() if p.requires_grad}


def _trainable(value: Any, depth: int) -> Iterator[nn.Module | nn.Parameter]:
    """Modules and parameters with something to train, inside plain containers."""
    if depth == 0 or not isinstance(value, (list, tuple, set, dict)):
        return
    for item in value.values() if isinstance(value, dict) else value:
        if (isinstance(item, nn.Parameter) and item.requires_grad) or (
            isinstance(item, nn.Module) and any(p.requires_grad for p in item.parameters())
        ):
            yield item
        else:
            yield from _trainable(item, depth - 1)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers


def configured(task: TaskModule) -> Any:
    """What `configure_optimizers` returns; a task without anything to train is refused first."""
    if not any(parameter.requires_grad for parameter in task.parameters()):
        count = sum(1 for _ in task.parameters())
        why = f"all {count} of its parameters have requires_grad=False" if count else "it has no registered parameters"
        raise TaskError(
            f"{type(task).__name__} has nothing to train: {why}. Assign layers to attributes in __init__ "
            "(self.net = nn.Linear(...)), or unfreeze some."
        )
    return task.configure_optimizers()


def check_optimizers(optimizers: Optimizers, task: TaskModule) -> None:
    """Refuse optimizers over somebody else's parameters; warn of trainable parameters in no optimizer."""
    named = {id(parameter): name for name, parameter in task.named_parameters()}
    covered: set[int] = set()
    for name, entry in optimizers.entries.items():
        label = f"{type(entry.optimizer).__name__}{f' {name!r}' if name else ''}"
        foreign = [p for p in entry.parameters if id(p) not in named]
        if foreign:
            own = len(entry.parameters) - len(foreign)
            raise TaskError(
                f"{label} has {len(entry.parameters)} parameters, but {own or 'none'} of them belong to "
                f"{type(task).__name__}. "
                "Build it from self.parameters() inside configure_optimizers, after all layers were made."
            )
        if not any(p.requires_grad for p in entry.parameters):
            if name is None or not any(p.requires_grad for p in optimizers.parameters(None)):
                raise TaskError(f"{label} has no parameter that requires a gradient. Leave it out, or unfreeze some.")
            warnings.warn(f"{label} has no parameter that requires a gradient: it rests until one does.", stacklevel=2)
        covered |= {id(p) for p in entry.parameters}
    orphans = {name: p for name, p in task.named_parameters() if id(p) not in covered and p.requires_grad}
    optimizers.orphans, missed = list(orphans.values()), list(orphans)
    if missed:
        warnings.warn(
            f"{len(missed)} trainable parameters of {type(task).__name__} are in no optimizer and will not be trained: "
            f"{', '.join(missed[:4])}{', ...' if len(missed) > 4 else ''}. Add them, or set requires_grad_(False).",
            stacklevel=2,
        )


OWNER_RETURNED_NONE = (
    "forge_train_step reached core although the step was finished already: its owner returned None. "
    "Return True from an owner of an action."
)

# ---------------------------------------------------------------------------------------------------------------------
# The first batch


def first_forward(step: Step, batch: Any) -> Any:
    """The forward of a first batch, with its losses watched and its output checked."""
    task, hooks = step.trainer.task, step.trainer.hooks
    where = f"{type(task).__name__}.{STAGE_METHODS[step.stage]}"
    if task.check_first_batch and not _is_compiled(step.trainer.model):
        with LossWatch():
            output = hooks.forge_forward(step, batch)
    else:
        output = hooks.forge_forward(step, batch)
    if step.stage == "train":
        check_training_output(output, task)
    elif step.stage != "predict":
        check_metrics(output, where)
    return output


def check_metrics(output: Any, where: str) -> None:
    """An evaluation step returns a scalar loss or a dict of scalars."""
    if isinstance(output, Tensor):
        check_scalars({"loss": output}, where)
    elif isinstance(output, Mapping):
        check_scalars(output, where)
    else:
        raise TaskError(f"{where} returned {type(output).__name__}; return a scalar loss or a dict of scalar metrics.")


def check_training_output(output: Any, task: TaskModule) -> None:
    """A training step returns a scalar loss with its graph, or a dict with one under "loss" and scalar metrics."""
    where = f"{type(task).__name__}.training_step"
    if not isinstance(output, Tensor) and not (isinstance(output, Mapping) and "loss" in output):
        shown = (
            f"a dict without 'loss' ({', '.join(map(str, output))})" if isinstance(output, Mapping) else repr(output)
        )
        shown = "None: is its `return` missing?" if output is None else shown
        raise TaskError(f'{where} returned {shown}. Return the loss, or {{"loss": loss, **metrics}}.')
    loss = output if isinstance(output, Tensor) else output["loss"]
    if not isinstance(loss, Tensor):
        raise TaskError(
            f"{where} returned a loss of type {type(loss).__name__}; it must be a tensor with its graph. "
            "Do not call .item() on it: forge reads it for you."
        )
    if loss.ndim != 0:
        raise TaskError(
            f"{where} returned a loss of shape {tuple(loss.shape)}; it must be a scalar. Reduce it with .mean(), or "
            "use reduction='mean' in the loss."
        )
    if not loss.requires_grad:
        raise TaskError(
            f"{where} returned a loss that carries no gradient. Look for .detach(), .item(), torch.no_grad(), argmax, "
            f"or frozen parameters between the weights of {type(task).__name__} and the loss."
        )
    if isinstance(output, Mapping):
        check_scalars(output, where)


def _is_compiled(model: nn.Module) -> bool:
    # a mode around a compiled module would make it compile twice
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


class LossWatch(TorchFunctionMode):
    """Looks at the arguments of torch's own losses while the first batch passes through them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() and func in _WATCHED:
            self._look(func, args, kwargs)
        return func(*args, **kwargs)

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        try:
            with torch.no_grad():
                _WATCHED[func](given.arguments)
        except TaskError:
            raise
        except Exception as error:  # under vmap, say, values cannot be read: a check must not be what fails
            logger.debug("could not look at the arguments of %s: %s", func, error)


def _look_at_cross_entropy(given: dict[str, Any]) -> None:
    logits, target, ignore = given["input"], given["target"], given["ignore_index"]
    classes = logits.shape[1] if logits.ndim > 1 else logits.shape[0]
    if target.is_floating_point():
        if target.shape != logits.shape:
            _refuse(
                f"cross_entropy got labels of type {_dtype(target)} and shape {tuple(target.shape)}; class labels are "
                "integers. Use y.long()."
            )
    else:
        _look_at_class_labels("cross_entropy", logits, target, classes, ignore)
    if classes > 1 and _are_probabilities(logits, dim=1 if logits.ndim > 1 else 0):
        _refuse(
            "cross_entropy got probabilities (every row sums to 1), but it applies softmax itself. Pass it the raw "
            "logits: remove the softmax before it."
        )


def _look_at_nll(given: dict[str, Any]) -> None:
    scores, target = given["input"], given["target"]
    classes = scores.shape[1] if scores.ndim > 1 else scores.shape[0]
    _look_at_class_labels("nll_loss", scores, target, classes, given["ignore_index"])
    if bool((scores > 1e-3).any()):
        warnings.warn(
            "nll_loss got positive scores, but it wants log-probabilities: if these are logits, use cross_entropy.",
            stacklevel=2,
        )


def _look_at_class_labels(loss: str, scores: Tensor, target: Tensor, classes: int, ignore: int) -> None:
    if target.is_floating_point() or target.dtype is torch.bool:
        _refuse(f"{loss} got labels of type {_dtype(target)}; class labels are integers. Use y.long().")
    expected = scores.shape[:1] + scores.shape[2:] if scores.ndim > 1 else scores.shape[:0]
    if target.shape == scores.shape and scores.ndim > 1:
        _refuse(f"{loss} got one-hot labels of type {_dtype(target)}; pass class indices: y.argmax(1).")
    if target.shape != expected:
        _refuse(
            f"{loss} got scores of shape {tuple(scores.shape)} and labels of shape {tuple(target.shape)}; the labels "
            f"must have shape {tuple(expected)}."
        )
    used = target[target != ignore]
    if used.numel():
        low, high = int(used.min()), int(used.max())
        if low < 0 or high >= classes:
            _refuse(
                f"{loss} got labels from {low} to {high}, but the model has {classes} outputs: labels run from 0 to "
                f"{classes - 1}. Renumber them, or give the last layer {high + 1} outputs."
            )
    if target.dtype not in (torch.int64, torch.uint8):
        _refuse(f"{loss} got labels of type {_dtype(target)}; they must be int64. Use y.long().")


def _look_at_bce_logits(given: dict[str, Any]) -> None:
    _look_at_binary_targets("binary_cross_entropy_with_logits", given)
    logits = given["input"]
    if logits.numel() >= 16 and bool(((logits >= 0) & (logits <= 1)).all()):
        warnings.warn(
            "binary_cross_entropy_with_logits got values that all lie in [0, 1]. It applies sigmoid itself: if there "
            "is a sigmoid before it, remove it.",
            stacklevel=2,
        )


def _look_at_bce(given: dict[str, Any]) -> None:
    _look_at_binary_targets("binary_cross_entropy", given)
    scores = given["input"]
    if bool(((scores < 0) | (scores > 1)).any()):
        _refuse(
            "binary_cross_entropy got values outside [0, 1]. Use binary_cross_entropy_with_logits on the raw logits."
        )


def _look_at_binary_targets(loss: str, given: dict[str, Any]) -> None:
    scores, target = given["input"], given["target"]
    if not target.is_floating_point():
        _refuse(f"{loss} got labels of type {_dtype(target)}; it wants floats. Use y.float().")
    _look_at_shapes(loss, scores, target)
    if target.numel() and (float(target.min()) < 0 or float(target.max()) > 1):
        _refuse(f"{loss} got labels from {float(target.min()):g} to {float(target.max()):g}; they lie in [0, 1].")


def _look_at_regression(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda given: _look_at_shapes(name, given["input"], given["target"])


def _look_at_shapes(loss: str, scores: Tensor, target: Tensor) -> None:
    if scores.shape != target.shape and target.ndim:  # a single number as target is meant for all
        fix = "y.unsqueeze(1)" if scores.ndim == target.ndim + 1 else "y.view_as(prediction)"
        _refuse(
            f"{loss} got predictions of shape {tuple(scores.shape)} and targets of shape {tuple(target.shape)}: "
            f"broadcasting would compare everything with everything. Give them one shape, for instance with {fix}."
        )


_WATCHED: dict[Any, Callable[[dict[str, Any]], None]] = {
    F.cross_entropy: _look_at_cross_entropy,
    F.nll_loss: _look_at_nll,
    F.binary_cross_entropy_with_logits: _look_at_bce_logits,
    F.binary_cross_entropy: _look_at_bce,
    **{f: _look_at_regression(f.__name__) for f in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)},
}


def _are_probabilities(scores: Tensor, dim: int) -> bool:
    values = scores.detach().float()
    constant = len(values) > 1 and bool((values == values[:1]).all())  # a head that has not learnt anything yet
    return not constant and bool((values >= 0).all()) and bool(((values.sum(dim) - 1).abs() < 1e-3).all())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refuse(message: str) -> None:
    raise TaskError(f"{_called_from()}{message}")


def _called_from() -> str:
    """The user's line that called the loss: the innermost frame outside torch and forge."""
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "forge"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}: "
        frame = frame.f_back
    return ""
