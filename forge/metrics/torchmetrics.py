"""Metrics that accumulate: the torchmetrics objects that a task holds, computed over all samples of a log interval or
of an evaluation, on all ranks together, rather than averaged over batches.

A task holds a metric as an attribute, updates it in a step, and returns it or not::

    self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=10)

    def validation_step(self, batch):
        ...
        self.accuracy.update(logits, y)
        return {"loss": loss, "accuracy": self.accuracy}

forge does not import torchmetrics: it knows its classes by their names. Nothing here runs in a step, except where a
metric is returned.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge.errors import TaskError

if TYPE_CHECKING:
    from forge.env import Env

PACKAGE = "torchmetrics"
KINDS = ("Metric", "MetricCollection")
WRAPPER = "WrapperMetric"

MetricStates = list[tuple[Any, dict[str, Any], int]]
"""Metrics with what they had accumulated: their states by name, and after how many updates."""


def is_metric(value: Any) -> bool:
    """Whether this is a Metric or a MetricCollection of torchmetrics, or made from one."""
    return isinstance(value, nn.Module) and any(
        kind.__name__ in KINDS and kind.__module__.partition(".")[0] == PACKAGE for kind in type(value).__mro__
    )


class TaskMetrics:
    """The metrics that a task holds, by the names of their attributes, and what the steps call them."""

    def __init__(self, task: nn.Module, prefix: str):
        self.prefix = prefix
        "What the names of metrics begin with that no step returns."
        self.metrics: dict[str, Any] = dict(_found(task))
        self.task = type(task).__name__
        self.computed: set[str] = set()
        "Metrics that have been updated so far, by attribute."
        self.names: dict[str, list[str]] = {}
        "What the steps call metrics, by attribute."
        self.returned: set[str] | None = getattr(task, "returned_metrics", None)
        "Where a task keeps this set, only what steps have ever returned is computed and reset: the rest is its own."
        self._paths = {id(metric): path for path, metric in self.metrics.items()}
        for path, metric in self.metrics.items():
            self._paths |= {id(member): f"{path}/{key}" for key, member in _members(metric).items()}

    def __len__(self) -> int:
        return len(self.metrics)

    def add_name(self, name: str, metric: Any) -> None:
        """A step has returned a metric under this name."""
        names = self.names.setdefault(self.claim(name, metric), [])
        if name not in names:
            names.append(name)

    def claim(self, name: str, metric: Any) -> str:
        """Forge resets this metric from now on, whether or not it computes it; the attribute that it is."""
        path = self._paths.get(id(metric))
        if path is None:
            raise TaskError(
                f"The metric {name!r} is a {type(metric).__name__} that is no attribute of {self.task}, so it would "
                "neither move to the device nor be saved. Make it in __init__: self.accuracy = ..., or put several "
                "into an nn.ModuleDict."
            )
        if self.returned is not None:
            self.returned.add(path.partition("/")[0])
        return path

    def compute(self, env: Env | None, only_returned: bool = False, reset: bool = True) -> dict[str, Any]:
        """The value of every metric that was updated on any rank; then they begin anew. All ranks must ask.

        `only_returned` leaves those alone that no step has returned, and forgets the names of the others.
        """
        named = only_returned or self.returned is not None
        chosen = {path: m for path, m in self.metrics.items() if not named or self._is_named(path, m)}
        updated = self._agreed(env, chosen) if env is not None else [_is_updated(each) for each in chosen.values()]
        values: dict[str, Any] = {}
        for (path, metric), asked in zip(chosen.items(), updated, strict=True):
            if asked:
                with _among(env, metric):
                    values |= self._named(path, metric, metric.compute())
                if reset:
                    metric.reset()
                self.computed.add(path)
        if only_returned:
            self.names = {}
        return values

    def _agreed(self, env: Env, chosen: Mapping[str, Any]) -> list[int]:
        """Whether each metric was updated on any rank. Where ranks hold lists that do not fit together, they are made
        to: torchmetrics gathers entry by entry, and every rank must join as often."""
        if not chosen:
            return []
        own = [(int(_is_updated(metric)), _digest(metric)) for metric in chosen.values()]
        numbers = env.all_max([number for updated, digest in own for number in (updated, digest, -digest)])
        for (path, metric), largest, negated in zip(chosen.items(), numbers[1::3], numbers[2::3], strict=True):
            if largest != -negated:
                self._fit_together(env, path, metric)
        return numbers[::3]

    def _fit_together(self, env: Env, path: str, metric: Any) -> None:
        """Give a rank without entries an empty one of another rank's kind."""
        lists = _lists(metric)
        by_rank = env.gather([_described(entries) for _, _, entries in lists])
        for (inner, name, entries), described in zip(lists, zip(*by_rank, strict=True), strict=True):
            counts = [count for count, _, _ in described]
            if _is_joined(inner, name):
                kinds = [(dtype, shape) for count, dtype, shape in described if count]
                if kinds and not entries:
                    dtype, shape = kinds[0]
                    entries.append(torch.empty((0, *shape[1:]), dtype=getattr(torch, dtype), device=inner.device))
                entries[:] = [entry.reshape(1) if entry.ndim == 0 else entry for entry in entries]
            elif len(set(counts)) > 1:
                raise TaskError(
                    f"{self.task}.{path}: {type(inner).__name__} keeps {name!r} as a list whose entries are not joined "
                    f"into one, and the ranks have {', '.join(map(str, counts))} of them, so they cannot be gathered. "
                    "Leave out the last, uneven batch (drop_last=True), or evaluate in one process."
                )

    @property
    def is_updated(self) -> bool:
        """Whether any metric has accumulated something since it was computed."""
        return any(map(_is_updated, self.metrics.values()))

    def is_forges(self, path: str) -> bool:
        """Whether forge computes and resets this metric, rather than the task itself."""
        return self.returned is None or path in self.returned

    def reset(self) -> None:
        """Every metric begins anew that is not the task's own business."""
        for path, metric in self.metrics.items():
            if self.is_forges(path):
                metric.reset()

    def snapshot(self) -> MetricStates:
        """What the metrics have accumulated, in a copy."""
        return [
            (inner, {name: _copied(value) for name, value in _state(inner).items()}, inner.update_count)
            for metric in self.metrics.values()
            for inner in _inner(metric)
        ]

    def updated(self) -> list[str]:
        """The attributes whose metric has been updated since the run began."""
        return [path for path, metric in self.metrics.items() if path in self.computed or _is_updated(metric)]

    def state_dict(self) -> dict[str, Any]:
        """What has been accumulated and not logged yet, and what wrappers remember of the whole run."""
        return {
            path: {
                "names": {key: names for key, names in self.names.items() if key.partition("/")[0] == path},
                "inner": [{"state": _state(m), "count": m.update_count} for m in _inner(metric)],
            }
            for path, metric in self.metrics.items()
            if _is_updated(metric) or any(map(_remembered, _inner(metric)))
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; a metric that is not in it begins anew."""
        for metric in self.metrics.values():
            metric.reset()
        for path, saved in state.items():
            inner = list(_inner(self.metrics[path])) if path in self.metrics else []
            for key, names in saved["names"].items():
                self.names[key] = [names] if isinstance(names, str) else list(names)  # one name in older checkpoints
            for metric, kept in zip(inner, saved["inner"], strict=False):
                restore_metrics(
                    [
                        (
                            metric,
                            {name: _moved(value, metric) for name, value in kept["state"].items()},
                            kept["count"],
                        )
                    ]
                )

    def _is_named(self, path: str, metric: Any) -> bool:
        return path in self.names or any(f"{path}/{key}" in self.names for key in _members(metric))

    def _named(self, path: str, metric: Any, value: Any) -> dict[str, Any]:
        """A metric's value as numbers by name. What is no number is left to `evaluation_end`, unless a step returned
        the metric for it."""
        names = self.names.get(path, [self.prefix + path.replace(".", "/")])
        parts = value if isinstance(value, Mapping) else {None: value}
        named: dict[str, Any] = {}
        for key, part in parts.items():
            own = self.names.get(f"{path}/{key}", [])
            asked = bool(own) or path in self.names
            for name in own or [name if key is None else f"{name}/{key}" for name in names]:
                named |= self._number(name, part, metric, asked)
        return named

    def _number(self, name: str, value: Any, metric: Any, asked: bool) -> dict[str, Any]:
        if isinstance(value, Tensor) and value.numel() == 1:
            return {name: value.detach().reshape(())}
        if isinstance(value, (int, float)):
            return {name: value}
        if asked:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TaskError(
                f"The metric {name!r}, a {type(metric).__name__}, computes {shown}; a step returns metrics that "
                "compute a number. Do not return it: compute it in evaluation_end, and return numbers or a forge.Image."
            )
        return {}


@contextmanager
def isolated(task: nn.Module, prefix: str) -> Iterator[TaskMetrics]:
    """The task's metrics for one evaluation: they begin anew, and afterwards have again what they had before.

    What a wrapper remembers beside its states, such as the best value so far, spans evaluations: it stays. What is the
    task's own business is left as it is.
    """
    held = TaskMetrics(task, prefix)
    before = {path: _states(metric) for path, metric in held.metrics.items()}
    held.reset()
    try:
        yield held
    finally:
        for path, metric in held.metrics.items():  # a copy has left inference mode: training can write into it
            restore_metrics(before[path] if held.is_forges(path) else _states(metric))


@contextmanager
def restored_after(task: nn.Module) -> Iterator[None]:
    """Whatever is counted meanwhile is not: what runs once more, beforehand, or for company only."""
    before = TaskMetrics(task, "").snapshot()
    try:
        yield
    finally:
        restore_metrics(before)


def copied(before: MetricStates) -> MetricStates:
    """The same once more, for metrics to write into."""
    return [(metric, {name: _copied(value) for name, value in state.items()}, count) for metric, state, count in before]


def restore_metrics(before: MetricStates) -> None:
    """Give metrics what they had accumulated."""
    for metric, state, count in before:
        for name, value in state.items():
            setattr(metric, name, value)
        metric._update_count, metric._computed = count, None


def ignore_padding(task: nn.Module, model: nn.Module, is_padding: Callable[[], bool]) -> None:
    """Keep padding batches out of the task's metrics in training: a rank without samples of a small batch trains on
    another rank's sample, at weight 0."""
    held, before_padding = TaskMetrics(task, ""), []

    def before(module: nn.Module, given: tuple[Any, ...]) -> None:
        if given[1] == "train" and is_padding():
            before_padding.append(held.snapshot())

    def after(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if before_padding:
            restore_metrics(before_padding.pop())

    if held:
        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)


# ---------------------------------------------------------------------------------------------------------------------
# What torchmetrics objects are made of


def _found(module: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """(path, metric) of all that a task holds; what torchmetrics itself puts around a metric is one of its own."""
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
    """The metrics of a collection, by the names that its result has."""
    return dict(metric.items(keep_base=False, copy_state=False)) if hasattr(metric, "compute_groups") else {}


def _inner(metric: Any) -> Iterator[Any]:
    """The metrics that hold states: a collection's, and those that a wrapper wraps."""
    return (module for module in metric.modules() if is_metric(module) and not hasattr(module, "compute_groups"))


def _states(metric: Any) -> MetricStates:
    """What a metric has accumulated, in a copy, without what wrappers remember."""
    return [(m, {name: _copied(v) for name, v in m.metric_state.items()}, m.update_count) for m in _inner(metric)]


def _is_updated(metric: Any) -> bool:
    return any(inner.update_count for inner in _inner(metric) if not _is_wrapper(inner))  # some count 1 from the start


def _is_wrapper(metric: Any) -> bool:
    return any(kind.__name__ == WRAPPER for kind in type(metric).__mro__)


def _state(metric: Any) -> dict[str, Any]:
    """All that a metric has accumulated."""
    return {**metric.metric_state, **_remembered(metric)}


def _remembered(metric: Any) -> dict[str, Tensor]:
    """What a wrapper has computed so far and keeps as plain attributes: the lowest and the highest value."""
    if not _is_wrapper(metric):
        return {}
    return {name: value for name, value in vars(metric).items() if isinstance(value, Tensor) and name[0] != "_"}


def _lists(metric: Any) -> list[tuple[Any, str, list[Any]]]:
    """(metric, name, entries) of every state that is a list and is gathered from all ranks."""
    _members(metric)  # in a collection, metrics that share their states hold the same lists from now on
    return [
        (inner, name, value)
        for inner in _inner(metric)
        if inner.sync_on_compute and not _is_wrapper(inner)
        for name, value in inner.metric_state.items()
        if isinstance(value, list)
    ]


def _is_joined(metric: Any, name: str) -> bool:
    """Whether a list's entries are one tensor before ranks gather it."""
    return getattr(metric._reductions[name], "__name__", "") == "dim_zero_cat"


def _described(entries: list[Any]) -> tuple[int, str, tuple[int, ...]]:
    """(how many, their dtype, the shape of the first)."""
    first = entries[0] if entries and isinstance(entries[0], Tensor) else torch.empty(0)
    return len(entries), str(first.dtype).removeprefix("torch."), tuple(first.shape)


def _digest(metric: Any) -> int:
    """A number that is the same on two ranks where their lists can be gathered as they are."""
    kinds = [
        (bool(entries), len(entries) == 1 and entries[0].ndim == 0) if _is_joined(inner, name) else len(entries)
        for inner, name, entries in _lists(metric)
    ]
    return int.from_bytes(hashlib.sha256(repr(kinds).encode()).digest()[:7]) if kinds else 0


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value  # reset empties a list, and replaces a tensor


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else _listed(value)  # update writes into a tensor


def _moved(value: Any, metric: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(metric.device)
    return [_moved(part, metric) for part in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def _among(env: Env | None, metric: Any) -> Iterator[None]:
    """torchmetrics computes over all ranks of its group. Where several ranks hold one model between them, and so one
    share of the data, only one of them is to count; and a rank that had no batch is no mistake."""
    inner = list(_inner(metric))
    groups = [m.process_group for m in inner]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was called before the ``update`` method.*")
        try:
            for m in inner:
                m.process_group = m.process_group if m.process_group is not None else _data_group(env)
            yield
        finally:
            for m, group in zip(inner, groups, strict=True):
                m.process_group = group


def _data_group(env: Env | None) -> Any:
    if env is None or env.data_world == env.world or env.mesh is None:
        return None
    axes: tuple[str, ...] = getattr(env, "data_axes", ())
    mesh = env.mesh[axes[0]] if len(axes) == 1 else env.mesh[axes]._flatten()
    return mesh.get_group()
