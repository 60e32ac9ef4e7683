"""The torchmetrics objects of a task, computed over all samples of a log interval or an evaluation, on all ranks
together, rather than averaged over batches.

A task has a metric as an attribute, updates it in a step, and may return it::

    self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=10)

    def validation_step(self, batch):
        ...
        self.accuracy.update(logits, y)
        return {"loss": loss, "accuracy": self.accuracy}

It recognises torchmetrics' classes by name, and imports it only where ranks gather, which is torchmetrics' own work. In
a step, this code runs only if a metric is returned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forge.env import Env
from forge.errors import TaskError

PACKAGE = "torchmetrics"
KINDS = ("Metric", "MetricCollection")
WRAPPER = "WrapperMetric"

MetricStates = list[tuple[Any, dict[str, Any], int]]
"""Metrics with their states by name and their number of updates."""


def is_metric(value: Any) -> bool:
    """Whether this is a Metric or a MetricCollection of torchmetrics, or of a subclass."""
    return isinstance(value, nn.Module) and any(
        kind.__name__ in KINDS and kind.__module__.partition(".")[0] == PACKAGE for kind in type(value).__mro__
    )


class TaskMetrics:
    """The metrics of a task by attribute, with the names under which steps return them."""

    def __init__(self, task: nn.Module, prefix: str):
        self.prefix = prefix
        "The prefix of metrics that no step returns."
        self.metrics: dict[str, Any] = dict(_found(task))
        self.task = type(task).__name__
        self.computed: set[str] = set()
        "Attributes of metrics that have been updated so far."
        self.names: dict[str, list[str]] = {}
        "The names under which steps return metrics, by attribute."
        self.returned: set[str] | None = getattr(task, "returned_metrics", None)
        "If the task has this set, only metrics in it are computed and reset here; the task manages the others."
        self._paths = {id(metric): path for path, metric in self.metrics.items()}
        for path, metric in self.metrics.items():
            self._paths |= {id(member): f"{path}/{key}" for key, member in _members(metric).items()}

    def __len__(self) -> int:
        return len(self.metrics)

    def add_name(self, name: str, metric: Any) -> None:
        """Record that a step returned a metric under this name."""
        names = self.names.setdefault(self.claim(name, metric), [])
        if name not in names:
            names.append(name)

    def claim(self, name: str, metric: Any) -> str:
        """Let forge reset this metric from now on; return its attribute."""
        path = self._paths.get(id(metric))
        if path is None:
            raise TaskError(
                f"The metric {name!r} is a {type(metric).__name__} that is no attribute of {self.task}, so it would "
                "neither move to the device nor be saved. Create it in __init__: self.accuracy = ..., or put several "
                "into an nn.ModuleDict."
            )
        if self.returned is not None:
            self.returned.add(path.partition("/")[0])
        return path

    def compute(self, env: Env | None, only_returned: bool = False, reset: bool = True) -> dict[str, Any]:
        """Return the value of every metric that was updated on any rank, and reset them. All ranks must call.

        `only_returned` skips metrics that no step has returned, and forgets the names of the others.
        """
        named = only_returned or self.returned is not None
        chosen = {path: m for path, m in self.metrics.items() if not named or self._is_named(path, m)}
        if env is not None:
            self._take_states(env)
        updated = (
            self._agreed(env, chosen) if env is not None and chosen else [_is_updated(each) for each in chosen.values()]
        )
        values: dict[str, Any] = {}
        for (path, metric), is_updated in zip(chosen.items(), updated, strict=True):
            if is_updated:
                with _over_data_ranks(env, metric):
                    values |= self._named(path, metric, metric.compute())
                if reset:
                    metric.reset()
                self.computed.add(path)
        if only_returned:
            self.names = {}
        return values

    def _take_states(self, env: Env) -> None:
        """Take the states of the rank that has run the steps to their end."""
        own = [
            (inner, _state(inner), inner.update_count) for metric in self.metrics.values() for inner in _inner(metric)
        ]
        given = [(state, count) for _, state, count in own]
        theirs = env.metric_states(given)
        if theirs is not given:
            restore_metrics(
                [
                    (inner, {name: _moved(value, inner) for name, value in state.items()}, count)
                    for (inner, _, _), (state, count) in zip(own, theirs, strict=True)
                ]
            )

    def _agreed(self, env: Env, chosen: Mapping[str, Any]) -> list[int]:
        """Return whether each metric was updated on any rank. Refuse lists that torchmetrics cannot gather: entry by
        entry, and the ranks have other numbers of them."""
        own = [(int(_is_updated(metric)), _separate_entries(metric)) for metric in chosen.values()]
        numbers = env.all_max([number for updated, count in own for number in (updated, count, -count)])
        for (path, metric), most, least in zip(chosen.items(), numbers[1::3], numbers[2::3], strict=True):
            if most != -least:
                raise TaskError(
                    f"{self.task}.{path}: {type(metric).__name__} keeps lists whose entries are not joined into one, "
                    f"and the ranks have {-least} to {most} of them, so they cannot be gathered. Drop the last, uneven "
                    "batch (drop_last=True), or evaluate in one process."
                )
        return numbers[::3]

    @property
    def is_updated(self) -> bool:
        """Whether any metric has been updated since it was computed."""
        return any(map(_is_updated, self.metrics.values()))

    def is_managed(self, path: str) -> bool:
        """Whether forge computes and resets this metric, rather than the task itself."""
        return self.returned is None or path in self.returned

    def reset(self) -> None:
        """Reset every metric that the task does not manage itself."""
        for path, metric in self.metrics.items():
            if self.is_managed(path):
                metric.reset()

    def snapshot(self) -> MetricStates:
        """Return a copy of the metrics' states."""
        return [
            (inner, {name: _copied(value) for name, value in _state(inner).items()}, inner.update_count)
            for metric in self.metrics.values()
            for inner in _inner(metric)
        ]

    def updated(self) -> list[str]:
        """Return the attributes of metrics updated since the run began."""
        return [path for path, metric in self.metrics.items() if path in self.computed or _is_updated(metric)]

    def state_dict(self) -> dict[str, Any]:
        """Return the states that are not logged yet, and the values that wrappers keep over the whole run."""
        return {
            path: {
                "names": {key: names for key, names in self.names.items() if key.partition("/")[0] == path},
                "inner": [{"state": _state(m), "count": m.update_count} for m in _inner(metric)],
            }
            for path, metric in self.metrics.items()
            if _is_updated(metric) or any(map(_remembered, _inner(metric)))
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states; reset a metric without one."""
        for metric in self.metrics.values():
            metric.reset()
        for path, saved in state.items():
            inner = list(_inner(self.metrics[path])) if path in self.metrics else []
            self.names |= {key: list(names) for key, names in saved["names"].items()}
            for metric, kept in zip(inner, saved["inner"], strict=False):
                state = {name: _moved(value, metric) for name, value in kept["state"].items()}
                restore_metrics([(metric, state, kept["count"])])

    def _is_named(self, path: str, metric: Any) -> bool:
        return path in self.names or any(f"{path}/{key}" in self.names for key in _members(metric))

    def _named(self, path: str, metric: Any, value: Any) -> dict[str, Any]:
        """Return a metric's value as numbers by name; skip parts that are no number, unless a step returned them."""
        names = self.names.get(path, [self.prefix + path.replace(".", "/")])
        parts = value if isinstance(value, Mapping) else {None: value}
        named: dict[str, Any] = {}
        for key, part in parts.items():
            own = self.names.get(f"{path}/{key}", [])
            returned = bool(own) or path in self.names
            for name in own or [name if key is None else f"{name}/{key}" for name in names]:
                named |= self._number(name, part, metric, returned)
        return named

    def _number(self, name: str, value: Any, metric: Any, returned: bool) -> dict[str, Any]:
        if isinstance(value, Tensor) and value.numel() == 1:
            return {name: value.detach().reshape(())}
        if isinstance(value, (int, float)):
            return {name: value}
        if returned:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TaskError(
                f"The metric {name!r}, a {type(metric).__name__}, computes {shown}; a step may return only metrics "
                "that compute a number. Compute it in evaluation_end, and return numbers or a forge.Image."
            )
        return {}


@contextmanager
def isolated(task: nn.Module, prefix: str) -> Iterator[TaskMetrics]:
    """Reset the task's metrics for one evaluation, and restore their states afterwards.

    Values that a wrapper keeps over evaluations, such as the best so far, and metrics that the task manages itself are
    not restored.
    """
    metrics = TaskMetrics(task, prefix)
    before = {path: _states(metric) for path, metric in metrics.metrics.items()}
    metrics.reset()
    try:
        yield metrics
    finally:
        for path, metric in metrics.metrics.items():  # copies are no inference tensors: training can write into them
            restore_metrics(before[path] if metrics.is_managed(path) else _states(metric))


@contextmanager
def restored_after(task: nn.Module) -> Iterator[None]:
    """Restore the task's metrics afterwards: for repeated steps, trial steps and padding batches."""
    before = TaskMetrics(task, "").snapshot()
    try:
        yield
    finally:
        restore_metrics(before)


def copied(before: MetricStates) -> MetricStates:
    """Return another copy, for metrics to write into."""
    return [(metric, {name: _copied(value) for name, value in state.items()}, count) for metric, state, count in before]


def restore_metrics(before: MetricStates) -> None:
    """Restore the states and update counts of metrics."""
    for metric, state, count in before:
        for name, value in state.items():
            setattr(metric, name, value)
        metric._update_count, metric._computed = count, None


def ignore_padding(task: nn.Module, model: nn.Module, is_padding: Callable[[], bool]) -> None:
    """Keep padding batches out of the task's metrics in training."""
    metrics, before_padding = TaskMetrics(task, ""), []

    def before(module: nn.Module, given: tuple[Any, ...]) -> None:
        before_padding[:] = [metrics.snapshot()] if given[1] == "train" and is_padding() else []

    def after(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if before_padding:
            restore_metrics(before_padding.pop())

    if metrics:
        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)


def _found(module: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (path, metric) of every metric of a task; a wrapper of torchmetrics is one metric."""
    seen = set() if seen is None else seen
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if id(child) in seen:
            continue
        seen.add(id(child))
        if is_metric(child):
            yield below, child
        elif type(child).__module__.partition(".")[0] != PACKAGE:
            yield from _found(child, below, seen)


def _members(metric: Any) -> dict[str, Any]:
    """Return the metrics of a collection, by the names of its result."""
    return dict(metric.items(keep_base=False, copy_state=False)) if hasattr(metric, "compute_groups") else {}


def _inner(metric: Any) -> Iterator[Any]:
    """Return the metrics with states: those of a collection, and those inside a wrapper."""
    return (module for module in metric.modules() if is_metric(module) and not hasattr(module, "compute_groups"))


def _states(metric: Any) -> MetricStates:
    """Return a copy of a metric's states, without the values that wrappers keep."""
    return [(m, {name: _copied(v) for name, v in m.metric_state.items()}, m.update_count) for m in _inner(metric)]


def _is_updated(metric: Any) -> bool:
    return any(inner.update_count for inner in _inner(metric) if not _is_wrapper(inner))  # some count 1 from the start


def _is_wrapper(metric: Any) -> bool:
    return any(kind.__name__ == WRAPPER for kind in type(metric).__mro__)


def _state(metric: Any) -> dict[str, Any]:
    """Return a metric's states, and the values that a wrapper keeps."""
    return {**metric.metric_state, **_remembered(metric)}


def _remembered(metric: Any) -> dict[str, Tensor]:
    """Return the values that a wrapper keeps as plain attributes: the lowest and the highest so far."""
    if not _is_wrapper(metric):
        return {}
    return {name: value for name, value in vars(metric).items() if isinstance(value, Tensor) and name[0] != "_"}


def _separate_entries(metric: Any) -> int:
    """Return the number of entries in lists that are gathered one by one."""
    return sum(
        len(value)
        for inner in _inner(metric)
        if inner.sync_on_compute and not _is_wrapper(inner)
        for name, value in inner.metric_state.items()
        if isinstance(value, list) and getattr(inner._reductions[name], "__name__", "") != "dim_zero_cat"
    )


def _gather_over(env: Env) -> Callable[..., list[Tensor]]:
    """Return what torchmetrics gathers a state with: its own way, where a rank without entries has an empty tensor.

    torchmetrics gives such a rank numbers in one dimension, whatever the others have.
    """

    def gather(own: Tensor, group: Any = None) -> list[Tensor]:
        from torchmetrics.utilities.distributed import gather_all_tensors

        kinds = env.gather((str(own.dtype).removeprefix("torch."), tuple(own.shape), own.numel()))
        filled = [(dtype, shape) for dtype, shape, count in kinds if count]
        if filled and not own.numel():
            dtype, shape = filled[0]
            own = torch.empty((0, *shape[1:]), dtype=getattr(torch, dtype), device=own.device)
        if any(shape for _, shape, _ in kinds) and own.ndim == 0:  # one number, where another rank has several
            own = own.reshape(1)
        return gather_all_tensors(own, group)

    return gather


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value  # reset empties a list, and replaces a tensor


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else _listed(value)  # update writes into a tensor


def _moved(value: Any, metric: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(metric.device)
    return [_moved(part, metric) for part in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def _over_data_ranks(env: Env | None, metric: Any) -> Iterator[None]:
    """Let torchmetrics compute over one rank of each model: ranks that hold one model together have the same data. A
    rank without a batch is no mistake."""
    inner = list(_inner(metric))
    before = [(m.process_group, m.dist_sync_fn) for m in inner]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was called before the ``update`` method.*")
        try:
            for m in inner:
                m.process_group = m.process_group if m.process_group is not None else _data_group(env)
                if (
                    env is not None
                    and m.dist_sync_fn is None
                    and any(isinstance(v, list) for v in m._defaults.values())
                ):
                    m.dist_sync_fn = _gather_over(env)
            yield
        finally:
            for m, (group, gather) in zip(inner, before, strict=True):
                m.process_group, m.dist_sync_fn = group, gather


def _data_group(env: Env | None) -> Any:
    along = getattr(env, "along", None)
    if along is None or env is None or getattr(env, "mean_world", 1) == env.world:
        return None
    return along(getattr(env, "mean_axes", ())).get_group()
