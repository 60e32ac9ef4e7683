"""The first batch: its losses watched, its output checked, and the parameters counted again after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from forge.contract.task import STAGE_METHODS, TaskModule
from forge.diagnose.checks.losses import LossWatch
from forge.diagnose.checks.user_line import warn_of
from forge.errors import TaskError
from forge.metrics.means import check_scalars

if TYPE_CHECKING:
    from forge.contract.step import Step
    from forge.optim.optimizers import Optimizers


def first_forward(step: Step, batch: Any) -> Any:
    """The forward of a first batch, with its losses watched and its output checked."""
    task, hooks = step.trainer.task, step.trainer.hooks
    where = f"{type(task).__name__}.{STAGE_METHODS[step.stage]}"
    before = dict(task.named_parameters()) if step.stage == "train" else {}
    if task.check_first_batch and not _is_compiled(step.trainer.model):
        with LossWatch():
            output = hooks.forge_forward(step, batch)
    else:
        output = hooks.forge_forward(step, batch)
    if step.stage == "train":
        check_training_output(output, task)
        if task.check_first_batch:
            warn_of_new_parameters(task, before, step.trainer.optimizers)
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
    if output is None:
        raise TaskError(f'{where} returned None: is its `return` missing? Return the loss, or {{"loss": loss, ...}}.')
    if not isinstance(output, Tensor) and not (isinstance(output, Mapping) and "loss" in output):
        shown = (
            f"a dict without 'loss' ({', '.join(map(str, output))})" if isinstance(output, Mapping) else repr(output)
        )
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


def warn_of_new_parameters(task: TaskModule, before: Mapping[str, nn.Parameter], optimizers: Optimizers) -> None:
    """Warn of trainable parameters that the first training step made or put in another's place, and that no optimizer
    was given."""
    known = {id(p) for p in before.values()} | {id(p) for p in optimizers.parameters(None)}
    # what is sharded has another object in its place between its forward and its backward
    fresh = [
        name
        for name, parameter in task.named_parameters()
        if id(parameter) not in known and parameter.requires_grad and type(before.get(name, parameter)) is nn.Parameter
    ]
    if fresh:
        made = "replaced" if fresh[0] in before else "made"
        warn_of(
            task.training_step,
            f"{type(task).__name__}.training_step {made} the parameters {', '.join(fresh[:4])}"
            f"{', ...' if len(fresh) > 4 else ''}, which no optimizer has: they will not be trained. Make them in "
            "__init__ (nn.LazyLinear and its like learn their size from the first batch), and change values in place.",
        )


def _is_compiled(model: nn.Module) -> bool:
    # a mode around a compiled module would make it compile twice
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )
