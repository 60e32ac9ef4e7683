"""The torchmetrics objects of a task, computed over all samples of a log interval or an evaluation, on all ranks
together, rather than averaged over batches.

A task has a metric as an attribute, updates it in a step, and may return it::

    self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=10)

    def validation_step(self, batch):
        ...
        self.accuracy.update(logits, y)
        return {"loss": loss, "accuracy": self.accuracy}

It recognises torchmetrics' classes by name, without importing it. In a step, this code runs only if a metric is
returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
        values: dict[str, Any] = {}
        with _over_ranks(env, [inner for metric in chosen.values() for inner in _inner(metric)]):
            updated = {path: metric for path, metric in chosen.items() if _is_updated(metric)}
            for path, metric in updated.items():
                values |= self._named(path, metric, metric.compute())
        self.computed.update(updated)
        for metric in updated.values() if reset else ():
            metric.reset()
        if only_returned:
            self.names = {}
        return values

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
                restore_metrics([(metric, _moved(kept["state"], metric.device), kept["count"])])

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


@contextmanager
def _over_ranks(env: Env | None, metrics: Sequence[Any]) -> Iterator[None]:
    """Let each metric hold the states of all ranks, reduced as torchmetrics does it.

    torchmetrics' own way cannot take a rank without samples, nor lists of other lengths. Of the ranks that have the
    same samples, because they hold one model together, one counts.
    """
    if env is None or env.world == 1 or not metrics:
        yield
        return
    own = [(metric, metric.metric_state, metric.update_count) for metric in metrics]
    ways = [metric.distributed_available_fn for metric in metrics]
    gathered = env.gather((env.mean_rank, [(_moved(state, "cpu"), count) for _, state, count in own]))
    try:
        for place, metric in enumerate(metrics):
            updated = [(part, *states[place]) for part, states in gathered if states[place][1]]
            first = {part: (state, count) for part, state, count in reversed(updated)}
            metric.distributed_available_fn = lambda: False
            metric._update_count, metric._computed = sum(count for _, count in first.values()), None
            if metric.sync_on_compute and first:
                _join(metric, [first[part][0] for part in sorted(first)])
        yield
    finally:
        restore_metrics(own)
        for metric, way in zip(metrics, ways, strict=True):
            metric.distributed_available_fn = way


def _join(metric: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Give a metric the states of several ranks: torchmetrics' reductions take tensors stacked, and lists as one."""
    for name, reduction in metric._reductions.items():
        parts = [_moved(state[name], metric.device) for state in states]
        if len(parts) == 1:
            joined = parts[0]
        elif isinstance(parts[0], Tensor):
            joined = torch.stack(parts)
        else:
            joined = [entry for part in parts for entry in part]
        if reduction is not None and len(parts) > 1 and len(joined):
            joined = reduction(joined)
        setattr(metric, name, joined)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value  # reset empties a list, and replaces a tensor


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else _listed(value)  # update writes into a tensor


def _moved(value: Any, device: Any) -> Any:
    """Return tensors, also in lists and by name, on a device."""
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {name: _moved(part, device) for name, part in value.items()}
    return [_moved(part, device) for part in value] if isinstance(value, (list, tuple)) else value
