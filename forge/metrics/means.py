"""Means that stay on the device until they are read.

On the CPU a value is read at once, which is cheaper than storing it. On an accelerator values are stored as tensors,
then reduced, packed and copied to the host together, once per log interval and asynchronously: no step waits for the
device.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from forge.env import Env
from forge.errors import TaskError
from forge.metrics.torchmetrics import MetricStates, TaskMetrics, copied, is_metric, restore_metrics

logger = logging.getLogger("forge")

FOLD_AFTER = 1024
"""Stored values per metric before they are folded into one, so that memory stays flat between rare reads."""


@dataclass(frozen=True, slots=True)
class Savepoint:
    """The means and task metrics at one time, for `Means.rollback`."""

    counted: Mapping[str, Any]
    task_metrics: MetricStates


class Means:
    """Weighted means of scalars by name."""

    def __init__(self, device: torch.device, env: Env | None = None):
        self.device = device
        self.on_host = device.type == "cpu"
        self._env = env if env is not None and env.world > 1 else None
        self._sums: dict[str, list[float]] = {}  # on the host: name -> [sum of value * weight, sum of weights]
        self._kept: dict[str, tuple[list[Any], list[Any]]] = {}  # on a device: values, weights; each a tensor or number
        self._history: PastSums | None = None
        self._flush: Callable[[], None] | None = None
        self.task_metrics: TaskMetrics | None = None
        "The task's torchmetrics objects; None if those that a step returns are ignored."

    def add(self, name: str, value: Any, weight: int | Tensor = 1) -> None:
        """Count `value` in the mean of `name`."""
        self.add_all("", {name: value}, weight)

    def add_all(self, prefix: str, metrics: Mapping[str, Any], weight: int | Tensor) -> None:
        """Count every metric in the mean of its name; in one function for speed, as it runs once per micro-batch."""
        if not self.on_host:
            self._append_all(prefix, metrics, weight)
            return
        mass = weight if type(weight) is int else float(weight)  # a checkpoint does not store numpy numbers
        if mass == 0:  # drops its values, NaN or not
            if self._env is not None:  # the names must be the same on all ranks
                for name, value in metrics.items():
                    if not self._accumulates(prefix + name, value):
                        self._sums.setdefault(prefix + name, [0.0, 0])
            return
        for name, value in metrics.items():
            if isinstance(value, Tensor):
                try:
                    value = value.item()
                except RuntimeError as error:
                    raise _no_scalar(prefix + name, value) from error
            elif type(value) is not float:
                if self._accumulates(prefix + name, value):
                    continue
                value = float(value)
            sums = self._sums.get(prefix + name)
            if sums is None:
                self._sums[prefix + name] = [value * mass, mass]
            else:
                sums[0] += value * mass
                sums[1] += mass

    def _append_all(self, prefix: str, metrics: Mapping[str, Any], weight: int | Tensor) -> None:
        self.flush()
        for name, value in metrics.items():
            if isinstance(value, Tensor):
                self.append(prefix + name, _detached(prefix + name, value), weight)
            elif not self._accumulates(prefix + name, value):
                self.append(prefix + name, value, weight)

    def track(self, task: nn.Module) -> None:
        """Reset the task's torchmetrics objects, and include them in these means; from now on count epochs too."""
        self._history = PastSums(self, epochs=getattr(task, "logs_epochs", True))
        self.task_metrics = TaskMetrics(task, "train/")
        self.task_metrics.reset()

    def _accumulates(self, name: str, value: Any) -> bool:
        """Whether a step's value is a torchmetrics object, which is computed when the means are read."""
        if not is_metric(value):
            return False
        if self.task_metrics is not None:
            self.task_metrics.add_name(name, value)
        return True

    def compute_task_metrics(self, only_returned: bool = False) -> None:
        """Add the values of the task's torchmetrics objects, replacing means of the same name. All ranks must call."""
        if self.task_metrics is None or not len(self.task_metrics):
            return
        counts = self._env is None or self._env.is_main  # every rank has the value of all
        for name, value in self.task_metrics.compute(self._env, only_returned).items():
            if self._history is not None:
                self._history.computed.add(name)
            number: Any = value if counts else 0.0
            if self.on_host:
                self._sums[name] = [float(number), int(counts)]
            else:
                self._kept[name] = ([_detached(name, number) if isinstance(number, Tensor) else number], [int(counts)])

    def append(self, name: str, value: Tensor | float, weight: int | float | Tensor) -> None:
        """On an accelerator, count a value that is not changed in place later."""
        values, weights = self._kept.setdefault(name, ([], []))
        values.append(value if isinstance(value, Tensor) else float(value))
        weights.append(weight)
        if len(values) >= FOLD_AFTER:
            total, mass = self._reduce(values, weights)
            self._kept[name] = ([total / mass], [mass])

    def flush_with(self, flush: Callable[[], None] | None) -> None:
        """Call `flush` before anything is read or counted: it appends the values that replayed steps have buffered."""
        self._flush = flush

    def flush(self) -> None:
        """Append the values that replayed steps have buffered."""
        if self._flush is not None:
            self._flush()

    @property
    def empty(self) -> bool:
        self.flush()
        return not self._sums and not self._kept and not (self.task_metrics and self.task_metrics.is_updated)

    def total(self, name: str) -> float:
        """Return the weighted sum behind the mean of `name` since the last read, on the host; one NaN makes it NaN."""
        sums = self._sums.get(name)
        return 0.0 if sums is None else sums[0]

    def latest(self, name: str, count: int) -> list[Tensor | float]:
        """On an accelerator, return the last `count` values of `name`, unread; folded ones count as one."""
        self.flush()
        return self._kept[name][0][-count:] if name in self._kept else []

    def savepoint(self) -> Savepoint:
        """Return the current state for `rollback`; cheap enough for every window."""
        self.flush()
        metrics = self.task_metrics.snapshot() if self.task_metrics else []
        return Savepoint(self._copy(self._sums if self.on_host else self._kept), metrics)

    def rollback(self, savepoint: Savepoint) -> None:
        """Return to a savepoint, any number of times; nothing may have been read in between."""
        self.flush()
        if self.on_host:
            self._sums = self._copy(savepoint.counted)
        else:
            self._kept = self._copy(savepoint.counted)
        restore_metrics(copied(savepoint.task_metrics))

    def _copy(self, counted: Mapping[str, Any]) -> dict[str, Any]:
        if self.on_host:
            return {name: list(pair) for name, pair in counted.items()}
        return {name: (list(values), list(weights)) for name, (values, weights) in counted.items()}

    def read(self, ends_epoch: bool = False) -> PendingMeans:
        """Return the means since the last read, and start again; from an accelerator they arrive asynchronously.

        In training (`track`), a short interval includes the one before, and `ends_epoch` adds the means of the epoch.
        On several ranks they are the means over all ranks, and all must call.
        """
        self.flush()
        self.compute_task_metrics()
        if self._env is not None:
            pairs = self._read_together(self._env)
        elif self.on_host:
            pairs, self._sums = self._sums, {}
        else:
            pairs, self._kept = {name: list(self._reduce(*pair)) for name, pair in self._kept.items()}, {}
        if self._history is not None:
            pairs = self._history.include(pairs, ends_epoch)
        parts: list[Any] = [part for pair in pairs.values() for part in pair]
        return PendingMeans(list(pairs), parts if self.on_host or not parts else torch.stack(parts))

    def _read_together(self, env: Env) -> dict[str, list[Any]]:
        sums, self._sums = self._sums, {}
        kept, self._kept = self._kept, {}
        names = sorted(sums.keys() | kept.keys())
        check_same_names(env, names)
        if not names:
            return {}
        if self.on_host:
            own = torch.tensor([sums[name] for name in names], dtype=torch.float64).flatten()
            flat = env.sum(own).tolist()
        else:
            flat = env.sum(torch.stack([part for name in names for part in self._reduce(*kept[name])])).unbind()
        return {name: list(flat[2 * i : 2 * i + 2]) for i, name in enumerate(names)}

    def state_dict(self) -> dict[str, Any]:
        """Return every value counted since the last read, unreduced, so that a restored mean has the same bits."""
        self.flush()
        kept = {name: [self._vector(values), self._vector(weights)] for name, (values, weights) in self._kept.items()}
        metrics = self.task_metrics.state_dict() if self.task_metrics else {}
        counted = {"sums": {name: list(pair) for name, pair in self._sums.items()}, "kept": kept}
        past = {} if self._history is None else {"past": self._history.state_dict()}
        return {**counted, **({"held": metrics} if metrics else {}), **past}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting from a state; one from the other kind of device is converted."""
        self.flush()
        if "by_rank" in state:
            self._load_by_rank(state["by_rank"])
            return
        if self.task_metrics:
            self.task_metrics.load_state_dict(state.get("held", {}))
        if self._history is not None:
            self._history.load_state_dict(state.get("past", {}))
        self._sums = {name: list(pair) for name, pair in state["sums"].items()} if self.on_host else {}
        self._kept = {}
        for name, (values, weights) in state["kept"].items():
            if self.on_host:
                total, mass = self._reduce(list(values), list(weights))
                self._sums[name] = [float(total), float(mass)]
            else:
                self._kept[name] = (list(values.to(self.device)), list(weights.to(self.device)))
        if not self.on_host:
            for name, (total, mass) in state["sums"].items():
                self._kept[name] = ([total / mass], [mass])

    def _load_by_rank(self, states: list[Mapping[str, Any]]) -> None:
        """Load each rank's own state; if the number of ranks has changed, rank 0 takes the counts of all."""
        env = self._env
        world, rank = (env.world, env.rank) if env is not None else (1, 0)
        if len(states) == world:
            self.load_state_dict(states[rank])
            return
        self._sums, self._kept = {}, {}
        if self.task_metrics:
            self.task_metrics.reset()
        lost = sorted({path for state in states for path in state.get("held", {})})
        if lost:
            logger.warning(
                f"The run had {len(states)} ranks and now has {world}: the values that {', '.join(lost)} accumulated "
                "since the last log are lost."
            )
        if rank == 0:
            together = Means(torch.device("cpu"))
            for state in states:
                part = Means(torch.device("cpu"))
                part.load_state_dict(state)
                for name, (total, mass) in part._sums.items():
                    before = together._sums.get(name, [0.0, 0])
                    together._sums[name] = [before[0] + total, before[1] + mass]
            together._sums = {name: pair for name, pair in together._sums.items() if pair[1]}
            self.load_state_dict(together.state_dict())
        if self._history is not None and states:
            self._history.load_state_dict(states[0].get("past", {}))  # sums over all ranks, the same on each

    def _reduce(self, values: list[Any], weights: list[Any]) -> tuple[Tensor, Tensor]:
        value, weight = self._vector(values), self._vector(weights)
        # a weight of 0 drops its value, NaN or not
        return torch.where(weight == 0, 0, value * weight).sum(), weight.sum()

    def _vector(self, items: list[Any]) -> Tensor:
        if not any(isinstance(item, Tensor) for item in items):
            return torch.tensor(items, dtype=torch.float32).to(self.device, non_blocking=True)
        scalars = [i if isinstance(i, Tensor) else torch.tensor(float(i)) for i in items]
        return torch.stack([s.to(self.device, torch.float32, non_blocking=True).reshape(()) for s in scalars])


class PastSums:
    """The sums of the epoch so far, and of the last interval; on several ranks, over all of them."""

    SHORT = 4
    """An interval of less than a quarter of the one before includes it: the mean of a few updates beside that of many
    looks like a cliff."""

    def __init__(self, means: Means, epochs: bool):
        self._means, self._epochs = means, epochs
        self._epoch: dict[str, list[Any]] = {}
        self._before: dict[str, list[Any]] = {}
        self._is_partial = False
        "Whether the run was resumed from a state of an earlier version, without the sums of its epoch."
        self.computed: set[str] = set()
        "Names of torchmetrics objects, whose values are no means."

    def include(self, pairs: Mapping[str, list[Any]], ends_epoch: bool) -> dict[str, list[Any]]:
        """Count an interval's sums, and return what to log for it; at the end of an epoch, its sums as well."""
        shown: dict[str, list[Any]] = {}
        for name, (total, mass) in pairs.items():
            if name in self.computed:
                shown[name] = [total, mass]
                continue
            if self._epochs and name.startswith("train/") and not name.endswith("_epoch"):
                sums = self._epoch.get(name, (0.0, 0))
                self._epoch[name] = [sums[0] + total, sums[1] + mass]
            shown[name] = self._before[name] = self._pooled(total, mass, self._before.get(name))
        if ends_epoch:
            epoch, self._epoch, self._is_partial = {} if self._is_partial else self._epoch, {}, False
            shown |= {f"{name}_epoch": sums for name, sums in epoch.items() if f"{name}_epoch" not in shown}
        return shown

    def _pooled(self, total: Any, mass: Any, before: list[Any] | None) -> list[Any]:
        if before is None:
            return [total, mass]
        if self._means.on_host:
            return [total + before[0], mass + before[1]] if mass * self.SHORT < before[1] else [total, mass]
        is_short = mass * self.SHORT < before[1]
        return [torch.where(is_short, here + there, here) for here, there in zip((total, mass), before, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as numbers, or as tensors of two."""
        past = {"epoch": self._epoch, "before": self._before}
        return {
            kind: {name: list(pair) if self._means.on_host else torch.stack(pair) for name, pair in sums.items()}
            for kind, sums in past.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; one from the other kind of device is converted."""
        self._is_partial = "epoch" not in state
        self._epoch, self._before = (
            {name: [self._part(part) for part in pair] for name, pair in state.get(kind, {}).items()}
            for kind in ("epoch", "before")
        )

    def _part(self, part: Any) -> Any:
        if self._means.on_host:
            return part if isinstance(part, (int, float)) else float(part)
        return torch.as_tensor(part, dtype=torch.float32, device=self._means.device)


def check_same_names(env: Env, names: list[str]) -> None:
    """Raise TaskError if ranks log different metrics: their sums could not be added."""
    digest = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7])
    largest, negated = env.all_max([digest, -digest])
    if largest == -negated:
        return
    by_rank = [set(each) for each in env.gather(names)]
    odd = {rank: sorted(set.union(*by_rank) - each) for rank, each in enumerate(by_rank) if set.union(*by_rank) != each}
    found = "; ".join(f"rank {rank} has no {', '.join(missing[:3])}" for rank, missing in list(odd.items())[:4])
    raise TaskError(
        f"The ranks log different metrics: {found}. Every rank must return and record the same names at every update; "
        "give a metric that does not apply the weight 0, or return 0."
    )


class PendingMeans:
    """Means on their way to the host; `result()` waits for them.

    `packed` holds a sum and a total weight per name, copied from a CUDA device to pinned memory asynchronously.
    """

    def __init__(self, names: list[str], packed: list[float] | Tensor):
        self._names, self._packed = names, packed
        self._arrived: torch.cuda.Event | None = None
        if isinstance(packed, Tensor) and packed.device.type == "cuda":
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def empty(self) -> bool:
        """Whether nothing was counted."""
        return not self._names

    @property
    def here(self) -> bool:
        """Whether the values are on the host."""
        return not isinstance(self._packed, Tensor)

    def result(self) -> dict[str, float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        flat = self._packed.tolist() if isinstance(self._packed, Tensor) else self._packed
        pairs = zip(self._names, flat[::2], flat[1::2], strict=True)
        return {name: float(total / mass) for name, total, mass in pairs if mass}


def scalars_of(output: Any) -> Any:
    """Return the scalars of an output of transformers, with its loss; anything else as it is."""
    if type(output) is dict or not (isinstance(output, Mapping) and "loss" in output and hasattr(output, "to_tuple")):
        return output
    return {name: value for name, value in output.items() if isinstance(value, Tensor) and value.ndim == 0}


def check_scalars(metrics: Mapping[str, Any], where: str) -> None:
    """Raise TaskError for a metric that cannot be averaged."""
    for name, value in metrics.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise TaskError(
                    f"{where} returned the metric {name!r} with shape {tuple(value.shape)}; a metric is a scalar. "
                    "Reduce it with .mean() or .sum()."
                )
        elif not isinstance(value, Real) and not is_metric(value):
            raise TaskError(
                f"{where} returned {type(value).__name__} for the metric {name!r}; return a number, a scalar tensor, "
                "or a metric of torchmetrics."
            )


def _no_scalar(name: str, value: Tensor) -> TaskError:
    shape = tuple(value.shape)
    return TaskError(f"The metric {name!r} has shape {shape}; a metric is a scalar. Reduce it with .mean().")


def _detached(name: str, value: Tensor) -> Tensor:
    """Return the value without its graph, copied if it may be changed in place (a parameter, a buffer, a view)."""
    if value.numel() != 1:
        raise _no_scalar(name, value)
    is_fresh = value.grad_fn is not None and not value._is_view()
    return value.detach() if is_fresh else value.detach().clone()
