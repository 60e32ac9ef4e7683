"""Evaluation: one pass over a stage's loaders in evaluation mode; modes and RNG are restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from forge.contract.run import Run
from forge.contract.step import Step
from forge.contract.task import COLLECT, STAGE_METHODS
from forge.data.accumulation_windows import length_of, set_epoch
from forge.data.live import resting
from forge.data.sharding import Portion
from forge.diagnose import checks
from forge.env import move
from forge.errors import DataError, TaskError
from forge.metrics import torchmetrics
from forge.metrics.means import Means, check_scalars
from forge.metrics.media import DRAWN
from forge.rng import RNGState
from forge.snapshot.sandbox import uncompiled

GRADIENT_MODES: Mapping[str, Any] = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": nullcontext}


def run(trainer: Run, stage: str) -> Any:
    """Evaluate a stage: return its metrics, or for "predict" the list of outputs (on the CPU), one per batch."""
    means, outputs = Means(trainer.env.device, trainer.env), []
    trainer.env.copy_from_first(trainer.task, parameters=False)
    loaders = trainer.loaders[stage]
    with torchmetrics.isolated(trainer.task, f"{stage}/") as means.task_metrics, evaluation_mode(trainer):
        for name, loader in loaders.items():
            prefix = f"{stage}/" if name is None else f"{stage}/{name}/"
            for step, raw, output in forward_batches(trainer, stage, name, loader):
                if stage == "predict":
                    outputs.append(None if step.is_padding else move(output, torch.device("cpu")))
                else:
                    count(means, prefix, output, 0 if step.is_padding else trainer.task.num_items(raw), step)
            if len(loaders) > 1:
                means.compute_task_metrics(only_returned=True)  # a metric counts each loader for itself
        if stage == "predict":
            return _from_all_ranks(trainer, outputs)
        ending = trainer.task.evaluation_end(stage)
        counted = means.read()
    metrics = {**counted.result(), **_from_first_rank(trainer, _named(stage, ending, trainer))}
    return checks.warn_of_non_finite(trainer, metrics)


def forward_batches(trainer: Run, stage: str, name: str | None, loader: Any) -> Iterator[tuple[Step, Any, Any]]:
    """Yield (step, raw batch, output) for every batch; refuse a loader that gives less than its length."""
    hooks, given = trainer.hooks, 0
    set_epoch(loader, 0)  # every pass is the same, however many came before
    try:
        for raw in loader:
            step = Step(trainer, stage)
            step.micro, step.loader = given, name
            trainer.evaluated += 1
            trainer.eval_step = step
            if isinstance(raw, Portion):
                raw, step.is_padding = raw.batch, raw.samples == 0
            batch = hooks.forge_prepare_batch(step, raw)
            with torchmetrics.restored_after(trainer.task) if step.is_padding else nullcontext():
                output = hooks.forge_forward(step, batch) if given else checks.first_forward(step, batch)
            given += 1
            yield step, raw, output
    except BaseException as error:
        error.__forge_eval_step__ = trainer.eval_step  # pyright: ignore[reportAttributeAccessIssue]
        raise
    finally:
        trainer.eval_step = None
    expected = length_of(loader)
    label = stage if name is None else f"{stage}/{name}"
    if given == 0 or (expected is not None and given < expected):
        said = "" if expected is None else f", but its length says {expected}"
        raise DataError(f"The {label} loader gave {given} batches{said}. Check its dataset, sampler and __len__.")


@contextmanager
def substituted(trainer: Run, stage: str, loaders: dict[Any, Any]) -> Iterator[None]:
    """Evaluate a stage on other loaders inside the `with`; their batches are not counted."""
    own, counted = trainer.loaders[stage], trainer.evaluated
    trainer.loaders[stage] = loaders
    try:
        yield
    finally:
        trainer.loaders[stage], trainer.evaluated = own, counted


def count(means: Means, prefix: str, output: Any, weight: int | Tensor, step: Step) -> None:
    """Add one batch's metrics to the means."""
    if isinstance(output, Tensor):
        means.add(f"{prefix}loss", output, weight)
        return
    if not isinstance(output, Mapping):
        if checks.gives_metrics_later(step.trainer.task) and output is None:
            return
        checks.check_metrics(output, f"{type(step.trainer.task).__name__}.{STAGE_METHODS[step.stage]}")
    for name, value in output.items():
        means.add(prefix + name, value, weight)


@contextmanager
def evaluation_mode(trainer: Run) -> Iterator[None]:
    """Set `eval()` and the task's gradient mode; restore modes and RNG afterwards, and leave fit no stray `.grad`."""
    task, device = trainer.task, trainer.env.device
    modes = [(module, module.training) for module in task.modules()]
    rng = RNGState.capture(device)
    task.eval()
    try:
        inference = task.evaluation == "inference" and trainer.env.inference_mode
        mode = gradient_mode(task.evaluation if inference or task.evaluation != "inference" else "no_grad")
        with trainer.optimizers.evaluating() if trainer.verb == "fit" else nullcontext(), mode:
            yield
    finally:
        for module, training in modes:
            module.training = training
        rng.restore(device)
        if task.evaluation == "grad" and trainer.verb == "fit":
            task.zero_grad(set_to_none=True)  # a backward inside evaluation must not leak into the next window


def collect(trainer: Run, function: Callable[[Any], Any]) -> Any:
    """Return `function(task)`, called as a forward is: in evaluation mode, without gradients, inside all plugins. It is
    not compiled: it runs a program of the user's, with environments and loops.

    Its random numbers are the run's own, as in a loop by hand.
    """
    with resting(trainer.task), uncompiled():
        return trainer.hooks.forge_forward(Step(trainer, COLLECT), function)


def gradient_mode(name: str) -> AbstractContextManager[Any]:
    """Return the context for `TaskModule.evaluation`."""
    if name not in GRADIENT_MODES:
        raise TaskError(f"TaskModule.evaluation is {name!r}; it can be 'inference', 'no_grad' or 'grad'.")
    return GRADIENT_MODES[name]()


def _named(stage: str, ending: Any, trainer: Run) -> dict[str, Any]:
    if ending is None:
        return {}
    where = f"{type(trainer.task).__name__}.evaluation_end"
    scalars = {key: value for key, value in ending.items() if not isinstance(value, DRAWN)}
    check_scalars(scalars, where)
    return {f"{stage}/{key}": float(value) if key in scalars else value for key, value in ending.items()}


def _from_all_ranks(trainer: Run, outputs: list[Any]) -> list[Any]:
    """Return the outputs of all ranks in the order of the data; a batch gives one output per data rank."""
    env = trainer.env
    if env.data_world == 1:
        return outputs
    by_rank = env.gather(outputs)[:: env.world // env.data_world]
    return [output for batch in zip(*by_rank, strict=True) for output in batch if output is not None]


def _from_first_rank(trainer: Run, ending: dict[str, Any]) -> dict[str, Any]:
    """Return rank 0's numbers on all ranks, because schedules and plugins may depend on them."""
    numbers = {name: value for name, value in ending.items() if isinstance(value, float)}
    others = {name: value for name, value in ending.items() if name not in numbers}
    return {**others, **trainer.env.broadcast(numbers)}
