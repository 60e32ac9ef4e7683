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

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from forge.errors import TaskError

if TYPE_CHECKING:
    from forge.env import Env
    from forge.trainer import Trainer

PACKAGE = "torchmetrics"
KINDS = ("Metric", "MetricCollection")

Kept = list[tuple[Any, dict[str, Any], int]]
"""Metrics with what they had accumulated: their states by name, and after how many updates."""


def is_metric(value: Any) -> bool:
    """Whether this is a Metric or a MetricCollection of torchmetrics, or made from one."""
    return isinstance(value, nn.Module) and any(
        kind.__name__ in KINDS and kind.__module__.partition(".")[0] == PACKAGE for kind in type(value).__mro__
    )


class Held:
    """The metrics that a task holds, by the names of their attributes, and what the steps call them."""

    def __init__(self, task: nn.Module, prefix: str):
        self.prefix = prefix
        "What the names of metrics begin with that no step returns."
        self.metrics: dict[str, Any] = dict(_found(task))
        self.task = type(task).__name__
        self.computed: set[str] = set()
        "Metrics that have been updated so far, by attribute."
        self._names: dict[str, str] = {}
        self._paths = {id(metric): path for path, metric in self.metrics.items()}
        for path, metric in self.metrics.items():
            self._paths |= {id(member): f"{path}/{key}" for key, member in _members(metric).items()}

    def __len__(self) -> int:
        return len(self.metrics)

    def call(self, name: str, metric: Any) -> None:
        """A step has returned a metric under this name."""
        path = self._paths.get(id(metric))
        if path is None:
            raise TaskError(
                f"The metric {name!r} is a {type(metric).__name__} that is no attribute of {self.task}, so it would "
                "neither move to the device nor be saved. Make it in __init__: self.accuracy = ..., or put several "
                "into an nn.ModuleDict."
            )
        self._names[path] = name

    def compute(self, env: Env | None, only_returned: bool = False) -> dict[str, Any]:
        """The value of every metric that was updated on any rank; then they begin anew. All ranks must ask.

        `only_returned` leaves those alone that no step has returned, and forgets the names of the others.
        """
        chosen = {path: m for path, m in self.metrics.items() if not only_returned or self._is_named(path, m)}
        updated = [int(_is_updated(metric)) for metric in chosen.values()]
        if env is not None and chosen:
            updated = env.agree(updated)
        values: dict[str, Any] = {}
        for (path, metric), asked in zip(chosen.items(), updated, strict=True):
            if asked:
                with _among(env, metric):
                    values |= self._named(path, metric, metric.compute())
                metric.reset()
                self.computed.add(path)
        if only_returned:
            self._names = {}
        return values

    def reset(self) -> None:
        """Every metric begins anew."""
        for metric in self.metrics.values():
            metric.reset()

    def keep(self) -> Kept:
        """What the metrics have accumulated, in a copy."""
        return [
            (inner, {name: _copied(value) for name, value in inner.metric_state.items()}, inner.update_count)
            for metric in self.metrics.values()
            for inner in _inner(metric)
        ]

    def updated(self) -> list[str]:
        """The attributes whose metric has been updated since the run began."""
        return [path for path, metric in self.metrics.items() if path in self.computed or _is_updated(metric)]

    def state_dict(self) -> dict[str, Any]:
        """What has been accumulated and not logged yet."""
        return {
            path: {
                "names": {key: name for key, name in self._names.items() if key.partition("/")[0] == path},
                "inner": [{"state": dict(m.metric_state), "count": m.update_count} for m in _inner(metric)],
            }
            for path, metric in self.metrics.items()
            if _is_updated(metric)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; a metric that is not in it begins anew."""
        self.reset()
        for path, saved in state.items():
            inner = list(_inner(self.metrics[path])) if path in self.metrics else []
            self._names |= saved["names"]
            for metric, kept in zip(inner, saved["inner"], strict=False):
                put_back(
                    [(metric, {name: _moved(value, metric) for name, value in kept["state"].items()}, kept["count"])]
                )

    def _is_named(self, path: str, metric: Any) -> bool:
        return path in self._names or any(f"{path}/{key}" in self._names for key in _members(metric))

    def _named(self, path: str, metric: Any, value: Any) -> dict[str, Any]:
        """A metric's value as numbers by name. What is no number is left to `evaluation_end`, unless a step returned
        the metric for it."""
        name = self._names.get(path, self.prefix + path.replace(".", "/"))
        if not isinstance(value, Mapping):
            return self._number(name, value, metric, asked=path in self._names)
        named: dict[str, Any] = {}
        for key, part in value.items():
            own = self._names.get(f"{path}/{key}")
            asked = own is not None or path in self._names
            named |= self._number(own or f"{name}/{key}", part, metric, asked)
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
def apart(task: nn.Module, prefix: str) -> Iterator[Held]:
    """The task's metrics for one evaluation: they begin anew, and afterwards have again what they had before."""
    held = Held(task, prefix)
    before = [(m, {n: _listed(v) for n, v in m.metric_state.items()}, m.update_count) for m in _all_inner(held)]
    held.reset()
    try:
        yield held
    finally:
        put_back(before)


@contextmanager
def kept(task: nn.Module) -> Iterator[None]:
    """Whatever is counted meanwhile is not: what runs once more, beforehand, or for company only."""
    before = Held(task, "").keep()
    try:
        yield
    finally:
        put_back(before)


def put_back(before: Kept) -> None:
    """Give metrics what they had accumulated."""
    for metric, state, count in before:
        for name, value in state.items():
            setattr(metric, name, value)
        metric._update_count, metric._computed = count, None


def mind_company(trainer: Trainer, model: nn.Module) -> None:
    """A rank without a share of a small batch trains on another's sample at weight 0: its metrics do not count it."""
    held, company = Held(trainer.task, ""), []

    def before(module: nn.Module, given: tuple[Any, ...]) -> None:
        if given[1] == "train" and trainer.step is not None and trainer.borrowed[trainer.step.micro]:
            company.append(held.keep())

    def after(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if company:
            put_back(company.pop())

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


def _all_inner(held: Held) -> list[Any]:
    return [inner for metric in held.metrics.values() for inner in _inner(metric)]


def _is_updated(metric: Any) -> bool:
    return any(inner.update_count for inner in _inner(metric))


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
    if env is None or env.shares == env.world or env.mesh is None:
        return None
    axes: tuple[str, ...] = getattr(env, "data_axes", ())
    mesh = env.mesh[axes[0]] if len(axes) == 1 else env.mesh[axes]._flatten()
    return mesh.get_group()
