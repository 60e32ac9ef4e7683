"""What a LightningModule logs: `self.log` as values in forge's means."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from forge.env import Env, move
from forge.errors import TaskError
from forge.metrics.means import Means
from forge.metrics.torchmetrics import TaskMetrics, is_metric
from forge_lightning.names import short

if TYPE_CHECKING:
    from forge.contract.run import Run


class LogCall(NamedTuple):
    """One call of `self.log`."""

    name: str
    value: Any
    on_step: bool
    on_epoch: bool
    weight: int | None
    add_dataloader_idx: bool


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
    """The arguments of `self.log` as forge needs them.

    Every sink gets every value, and on several ranks a value is always the mean over all of them, so that prog_bar,
    logger, sync_dist and its group, enable_graph and metric_attribute have nothing to say.
    """
    if is_metric(value):
        return LogCall(name, value, on_step is not False, bool(on_epoch), batch_size, add_dataloader_idx)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TaskError(f"{who}: self.log({name!r}) got a tensor of shape {tuple(value.shape)}. Log its .mean().")
    if not isinstance(value, (Tensor, Real)):
        raise TaskError(f"{who}: self.log({name!r}) got a {type(value).__name__}; log a number, or use log_dict.")
    if reduce_fx not in ("mean", "avg", torch.mean):
        raise TaskError(
            f"{who}: self.log({name!r}, reduce_fx={reduce_fx!r}): forge takes the mean. Hold a metric of torchmetrics "
            "(MaxMetric, MinMetric, SumMetric), update it, and log the object."
        )
    value = value.detach() if isinstance(value, Tensor) else float(value)
    return LogCall(name, value, on_step is not False, bool(on_epoch), batch_size, add_dataloader_idx)


def refuse_on_one_rank(who: str, name: str, world: int) -> None:
    """Ranks must log the same names: their means are taken together."""
    if world > 1:
        raise TaskError(
            f"{who}: self.log({name!r}, rank_zero_only=True): forge takes the mean over all ranks, so all of them must "
            "log it. Leave rank_zero_only out, and call self.log on every rank."
        )


def split(output: Any) -> tuple[Any, dict[str, Any]]:
    """What a step returned as (loss, other scalars); tensors of more than one number are for the module's own hooks."""
    if not isinstance(output, Mapping):
        return output, {}
    scalars = {
        str(name): value
        for name, value in output.items()
        if name != "loss" and (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1))
    }
    return output.get("loss"), scalars


def is_the_loss(value: Any, loss: Any) -> bool:
    """Whether what was logged is the loss that was returned: the same memory, or its number."""
    if not isinstance(loss, Tensor):
        return False
    if isinstance(value, Tensor):
        return value.data_ptr() == loss.data_ptr()
    number = float(loss.detach())  # whoever logs a number has waited for the device already
    return value == number or (value != value and number != number)


def of_this_batch(name: str, metric: Any) -> dict[str, Any]:
    """What a metric came to for the batch that it was last called with, by name; nothing, where it was only updated."""
    value = metric._forward_cache
    if value is None:
        warnings.warn(
            f"self.log({name!r}) got a {type(metric).__name__} without a value for this batch, so there is none to log "
            "for a step, as in Lightning: call the metric, metric(preds, target), rather than metric.update; or log it "
            "with on_step=False, on_epoch=True.",
            stacklevel=2,
        )
        return {}
    if isinstance(value, Mapping):
        return {f"{name}/{key}": part for key, part in value.items()}
    return {name: value}


def computed(metrics: TaskMetrics, env: Env) -> dict[str, float]:
    """What the metrics come to that were logged; they go on from there. All ranks must ask."""
    values = metrics.compute(env if env.world > 1 else None, reset=False)
    return {name: float(value) for name, value in values.items()}


class EpochMeans:
    """Values for an epoch of training, of what is logged with `on_epoch=True`; means are kept in checkpoints by rank,
    and what metrics have accumulated is with all that the task holds."""

    def __init__(self, trainer: Run):
        self._env = trainer.env
        self.means = Means(trainer.env.device, trainer.env)
        self.metrics = TaskMetrics(trainer.task, "train/")

    def read(self) -> dict[str, float]:
        """The means so far, which begin anew, and what metrics come to, which do not. All ranks must ask."""
        means = self.means.read().result() if self._env.world > 1 or not self.means.empty else {}
        return {**means, **computed(self.metrics, self._env)}

    def end(self) -> None:
        """The metrics that were logged begin anew; the others are the module's own business."""
        self.metrics.reset()
        self.metrics.names = {}

    def state_dict(self) -> dict[str, Any]:
        own = self.means.state_dict()
        if self._env.world == 1:
            return own
        return {"by_rank": self._env.gather(move(own, torch.device("cpu")))}


def in_training(name: str) -> str:
    return f"train/{short(name, 'train')}"
