"""Checks of the first batch: the arguments of its losses, its output, and parameters that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from forge.contract.step import Step
from forge.contract.task import STAGE_METHODS, TaskModule, defines
from forge.diagnose.checks.losses import LossWatch
from forge.diagnose.checks.user_line import saying, warn_of
from forge.errors import TaskError
from forge.metrics.means import check_scalars
from forge.metrics.torchmetrics import is_metric
from forge.optim.optimizers import Optimizers


def first_forward(step: Step, batch: Any) -> Any:
    """Run the forward of a first batch, and check the arguments of its losses and its output."""
    task, hooks = step.trainer.task, step.trainer.hooks
    where = f"{type(task).__name__}.{STAGE_METHODS[step.stage]}"
    before = dict(task.named_parameters()) if step.stage == "train" else {}
    look = task.check_first_batch and not is_compiled(step.trainer.model)
    with saying(step.trainer.said), LossWatch(_is_averaged(step)) if look else nullcontext():
        output = hooks.forge_forward(step, batch)
    if step.stage == "train":
        check_training_output(output, task)
        if task.check_first_batch:
            warn_of_new_parameters(task, before, step.trainer.optimizers)
    elif step.stage != "predict" and not (output is None and gives_metrics_later(task)):
        check_metrics(output, where)
    return output


def _is_averaged(step: Step) -> bool:
    """Whether the loss is one of several ranks', each weighed by its number of samples."""
    trainer = step.trainer
    many = trainer.env.data_world > 1 and not trainer.env.divides_samples
    return step.stage == "train" and many and not trainer.task_defines_num_items


def gives_metrics_later(task: TaskModule) -> bool:
    """Whether an evaluation has metrics besides what its steps return: of evaluation_end, or of torchmetrics."""
    return defines(task, "evaluation_end") or any(map(is_metric, task.modules()))


def check_metrics(output: Any, where: str) -> None:
    """Refuse an output of an evaluation step that is no scalar loss and no dict of scalars."""
    if isinstance(output, Tensor):
        check_scalars({"loss": output}, where)
    elif isinstance(output, Mapping):
        check_scalars(output, where)
    else:
        raise TaskError(f"{where} returned {type(output).__name__}; return a scalar loss or a dict of scalar metrics.")


def check_training_output(output: Any, task: TaskModule) -> None:
    """Refuse an output of a training step that is no scalar loss with its graph, and no dict with one as "loss"."""
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
    if loss.numel() != 1:
        raise TaskError(
            f"{where} returned a loss of shape {tuple(loss.shape)}; it must be a scalar. Reduce it with .mean(), or "
            "use reduction='mean' in the loss."
        )
    if not loss.requires_grad:
        error = TaskError(
            f"{where} returned a loss without a gradient. Look for .detach(), .item(), torch.no_grad(), argmax, "
            f"or frozen parameters between the weights of {type(task).__name__} and the loss."
        )
        error.finding = "no_gradient"
        raise error
    if isinstance(output, Mapping):
        check_scalars(output, where)


def warn_of_new_parameters(task: TaskModule, before: Mapping[str, nn.Parameter], optimizers: Optimizers) -> None:
    """Warn of trainable parameters that the first training step made or replaced, and that no optimizer has."""
    known = {id(p) for p in before.values()} | {id(p) for p in optimizers.parameters(None)}
    # a sharded parameter is replaced by another object between its forward and its backward
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
            "__init__ (nn.LazyLinear and similar layers get their size from the first batch), and change values in "
            "place.",
            "unregistered_parameters",
        )


def is_compiled(model: nn.Module) -> bool:
    # a mode around a compiled module would make it compile twice
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )
