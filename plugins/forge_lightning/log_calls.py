"""Calls of a LightningModule's `self.log`, and their values in forge's means."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge.contract.run import Run
from forge.env import Env, move
from forge.errors import TaskError
from forge.metrics.means import Means
from forge.metrics.torchmetrics import TaskMetrics, is_metric
from forge_lightning.names import short

REDUCTIONS: dict[Any, str] = {
    **{"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max"},
    **{torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max", sum: "sum", min: "min", max: "max"},
}
"""What `reduce_fx` may be."""
MERGE = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


class LogCall(NamedTuple):
    """One call of `self.log`."""

    name: str
    value: Any
    on_step: bool
    on_epoch: bool
    weight: int | None
    add_dataloader_idx: bool
    reduce: str = "mean"
    "How the values of an epoch become one: mean, sum, min or max."
    steps_named: bool = False
    "Whether on_step=True was written out: an evaluation then has `<name>_epoch` too."


def parse_log(
    who: str,
    name: str,
    value: Any,
    prog_bar: bool = False,
    logger: bool | None = None,
    on_step: bool | None = None,
    on_epoch: bool | None = None,
    reduce_fx: Any = "mean",
    enable_graph: bool = False,
    sync_dist: bool = False,
    sync_dist_group: Any = None,
    add_dataloader_idx: bool = True,
    batch_size: int | None = None,
    metric_attribute: str | None = None,
    rank_zero_only: bool = False,
) -> LogCall:
    """Check the arguments of `self.log` and return them as a LogCall.

    Every sink gets every value, and on several ranks a value is always the mean over all of them, so that prog_bar,
    logger, sync_dist and its group, enable_graph and metric_attribute have no effect.
    """
    if is_metric(value):
        return LogCall(name, value, on_step is not False, bool(on_epoch), batch_size, add_dataloader_idx)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TaskError(f"{who}: self.log({name!r}) got a tensor of shape {tuple(value.shape)}. Log its .mean().")
    if not isinstance(value, (Tensor, Real)):
        raise TaskError(f"{who}: self.log({name!r}) got a {type(value).__name__}; log a number, or use log_dict.")
    known = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    if known not in REDUCTIONS:
        raise TaskError(
            f"{who}: self.log({name!r}, reduce_fx={reduce_fx!r}): it can be mean, sum, min or max. For others, log a "
            "metric of torchmetrics as an object."
        )
    value = value.detach() if isinstance(value, Tensor) else float(value)
    batch = None if batch_size is None else int(batch_size)
    known = REDUCTIONS[known]
    return LogCall(name, value, on_step is not False, bool(on_epoch), batch, add_dataloader_idx, known, on_step is True)


def refuse_on_one_rank(who: str, name: str, world: int) -> None:
    """Raise TaskError for rank_zero_only on several ranks: means are taken over all ranks."""
    if world > 1:
        raise TaskError(
            f"{who}: self.log({name!r}, rank_zero_only=True): forge computes the mean over all ranks, so all of them "
            "must log it. Remove rank_zero_only, and call self.log on every rank."
        )


def refuse_other_reductions(who: str, name: str, reduce: str, world: int) -> None:
    """Raise TaskError for a sum, minimum or maximum on several ranks: values are averaged over them."""
    if world > 1:
        raise TaskError(
            f"{who}: self.log({name!r}, reduce_fx={reduce!r}) on several ranks: forge computes the mean there. Log a "
            "metric of torchmetrics (MaxMetric, MinMetric, SumMetric) as an object."
        )


def split(output: Any) -> tuple[Any, dict[str, Any]]:
    """Split a step's output into (loss, other scalars); larger tensors are only for the module's own hooks."""
    if not isinstance(output, Mapping):
        return output, {}
    scalars = {
        str(name): value
        for name, value in output.items()
        if name != "loss" and (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1))
    }
    return output.get("loss"), scalars


def is_the_loss(value: Any, loss: Any) -> bool:
    """Whether a logged value is the returned loss: the same memory, or the same number."""
    if not isinstance(loss, Tensor):
        return False
    if isinstance(value, Tensor):
        return value.data_ptr() == loss.data_ptr()
    number = float(loss.detach())  # a logged number has synchronized with the device already
    return value == number or (value != value and number != number)


def of_this_batch(name: str, metric: Any) -> dict[str, Any]:
    """Return a metric's values for its last batch by name; warn and return nothing if it was only updated."""
    value = metric._forward_cache
    if value is None:
        warnings.warn(
            f"self.log({name!r}) got a {type(metric).__name__} without a value for this batch, so nothing is logged "
            "for the step, as in Lightning: call the metric, metric(preds, target), instead of metric.update, or log "
            "it with on_step=False, on_epoch=True.",
            stacklevel=2,
        )
        return {}
    if isinstance(value, Mapping):
        return {f"{name}/{key}": part for key, part in value.items()}
    return {name: value}


def computed(metrics: TaskMetrics, env: Env) -> dict[str, float]:
    """Return the values of logged metrics without resetting them. Collective: all ranks must call it."""
    values = metrics.compute(env if env.world > 1 else None, reset=False)
    return {name: float(value) for name, value in values.items()}


class Reductions:
    """Sums, minima and maxima of values logged with another `reduce_fx` than the mean, by name."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[str, Tensor]] = {}

    def add(self, name: str, reduce: str, value: Any) -> None:
        """Add a value; nothing is read from its device."""
        value = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None).reshape(())
        known = self._values.get(name)
        merged = value.clone() if known is None else MERGE[reduce](known[1].to(value.device), value)
        self._values[name] = (reduce, merged)

    def read(self) -> dict[str, float]:
        """Return the values without resetting them."""
        return {name: float(value) for name, (_, value) in self._values.items()}

    def state_dict(self) -> dict[str, Any]:
        return {name: [reduce, value] for name, (reduce, value) in self._values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = {name: (str(reduce), torch.as_tensor(value)) for name, (reduce, value) in state.items()}


class EpochMeans:
    """Means and metrics over a training epoch of values logged with `on_epoch=True`. Checkpoints hold the means by
    rank; metric states are part of the task's state."""

    def __init__(self, trainer: Run):
        self._env = trainer.env
        self.means = Means(trainer.env.device, trainer.env)
        self.metrics = TaskMetrics(trainer.task, "train/")
        self.reductions = Reductions()

    def read(self) -> dict[str, float]:
        """Return and reset the means, and return the metrics, which continue. Collective: all ranks must call it."""
        means = self.means.read().result() if self._env.world > 1 or not self.means.empty else {}
        return {**means, **self.reductions.read(), **computed(self.metrics, self._env)}

    def end(self) -> None:
        """Reset the logged metrics; the module manages all others itself."""
        self.metrics.reset()
        self.metrics.names = {}
        self.reductions = Reductions()

    def state_dict(self) -> dict[str, Any]:
        own = self.means.state_dict()
        if self._env.world == 1:
            return own
        return {"by_rank": self._env.gather(move(own, torch.device("cpu")))}


def in_training(name: str) -> str:
    return f"train/{short(name, 'train')}"
