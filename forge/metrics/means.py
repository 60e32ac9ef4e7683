"""Metrics: means that stay on the device until somebody reads them.

On the CPU a value is read at once (that is cheaper than keeping it). On an accelerator values are kept as they are and
reduced, packed and copied to the host together, once per log interval, without waiting: nothing in a step reads the
device.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge.errors import TaskError
from forge.metrics.torchmetrics import MetricStates, TaskMetrics, copied, is_metric, restore_metrics

if TYPE_CHECKING:
    from forge.env import Env

logger = logging.getLogger("forge")

FOLD_AFTER = 1024
"""Kept values per metric before they are folded into one, so that memory stays flat however rarely one reads."""


@dataclass(frozen=True, slots=True)
class Savepoint:
    """Where counting stood."""

    counted: Mapping[str, Any]
    task_metrics: MetricStates


class Means:
    """Weighted means of scalars by name."""

    def __init__(self, device: torch.device, env: Env | None = None):
        self.device = device
        self.on_host = device.type == "cpu"
        self._env = env if env is not None and env.world > 1 else None
        self._sums: dict[str, list[float]] = {}  # on the host: name -> [sum of value * weight, sum of weights]
        self._kept: dict[str, tuple[list[Tensor | float], list[Tensor | float]]] = {}  # on a device: values, weights
        self._flush: Callable[[], None] | None = None
        self.task_metrics: TaskMetrics | None = None
        "The task's own metrics that accumulate; None where a step's are not looked at."

    def add(self, name: str, value: Any, weight: int | Tensor = 1) -> None:
        """Count `value` in the mean of `name`."""
        self.add_all("", {name: value}, weight)

    def add_all(self, prefix: str, metrics: Mapping[str, Any], weight: int | Tensor) -> None:
        """Count every metric in the mean of its name; once per micro-batch, so written out in one function."""
        if not self.on_host:
            self._keep_all(prefix, metrics, weight)
            return
        mass = weight if type(weight) is int else float(weight)  # a number of numpy's would not fit into a checkpoint
        if mass == 0:  # it drops its values, NaN or not
            if self._env is not None:  # the names are those of the other ranks all the same
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

    def _keep_all(self, prefix: str, metrics: Mapping[str, Any], weight: int | Tensor) -> None:
        self.flush()
        for name, value in metrics.items():
            if isinstance(value, Tensor):
                self.append(prefix + name, _detached(prefix + name, value), weight)
            elif not self._accumulates(prefix + name, value):
                self.append(prefix + name, value, weight)

    def track(self, task: nn.Module) -> None:
        """Count what the metrics that this task holds accumulate in training; they begin anew."""
        self.task_metrics = TaskMetrics(task, "train/")
        self.task_metrics.reset()

    def _accumulates(self, name: str, value: Any) -> bool:
        """Whether a step's value is a metric that accumulates: it is computed when the means are read."""
        if not is_metric(value):
            return False
        if self.task_metrics is not None:
            self.task_metrics.add_name(name, value)
        return True

    def compute_task_metrics(self, only_returned: bool = False) -> None:
        """Count what the metrics that accumulate come to, in place of what else has their name. All ranks must ask."""
        if self.task_metrics is None or not len(self.task_metrics):
            return
        counts = self._env is None or self._env.is_main  # every rank has the value of all
        for name, value in self.task_metrics.compute(self._env, only_returned).items():
            number: Any = value if counts else 0.0
            if self.on_host:
                self._sums[name] = [float(number), int(counts)]
            else:
                self._kept[name] = ([_detached(name, number) if isinstance(number, Tensor) else number], [int(counts)])

    def append(self, name: str, value: Tensor | float, weight: int | float | Tensor) -> None:
        """On an accelerator: count a value that nobody will change any more."""
        values, weights = self._kept.setdefault(name, ([], []))
        values.append(value if isinstance(value, Tensor) else float(value))
        weights.append(weight)
        if len(values) >= FOLD_AFTER:
            total, mass = self._reduce(values, weights)
            self._kept[name] = ([total / mass], [mass])

    def flush_with(self, flush: Callable[[], None] | None) -> None:
        """Call this before anything is looked at or counted: it hands over, by `keep`, what a replayed step has written
        down on the device meanwhile."""
        self._flush = flush

    def flush(self) -> None:
        """Have all there is handed over."""
        if self._flush is not None:
            self._flush()

    @property
    def empty(self) -> bool:
        self.flush()
        return not self._sums and not self._kept and not (self.task_metrics and self.task_metrics.is_updated)

    def total(self, name: str) -> float:
        """The weighted sum behind the mean of `name` since the last read, on the host. One NaN stays in it."""
        sums = self._sums.get(name)
        return 0.0 if sums is None else sums[0]

    def latest(self, name: str, count: int) -> list[Tensor | float]:
        """On an accelerator: the last `count` values of `name`, not read; what was folded together is one value."""
        self.flush()
        return self._kept[name][0][-count:] if name in self._kept else []

    def savepoint(self) -> Savepoint:
        """Where counting stands now, for `back_to`; cheap enough for every window."""
        self.flush()
        held = self.task_metrics.snapshot() if self.task_metrics else []
        if self.on_host:
            return Savepoint({name: list(pair) for name, pair in self._sums.items()}, held)
        return Savepoint({name: (list(values), list(weights)) for name, (values, weights) in self._kept.items()}, held)

    def rollback(self, savepoint: Savepoint) -> None:
        """Forget what was counted since `mark`, any number of times; nothing may have been read in between."""
        self.flush()
        if self.on_host:
            self._sums = {name: list(pair) for name, pair in savepoint.counted.items()}
        else:
            self._kept = {name: (list(values), list(weights)) for name, (values, weights) in savepoint.counted.items()}
        restore_metrics(copied(savepoint.task_metrics))

    def read(self) -> PendingMeans:
        """Start afresh, and hand out the means so far; on an accelerator they are on their way, not here yet.

        On several ranks they are the means over all of them, and all of them must ask.
        """
        self.flush()
        self.compute_task_metrics()
        if self._env is not None:
            return self._read_together(self._env)
        if self.on_host:
            sums, self._sums = self._sums, {}
            return PendingMeans(list(sums), [number for pair in sums.values() for number in pair])
        kept, self._kept = self._kept, {}
        if not kept:
            return PendingMeans([], [])
        return PendingMeans(list(kept), torch.stack([part for pair in kept.values() for part in self._reduce(*pair)]))

    def _read_together(self, env: Env) -> PendingMeans:
        sums, self._sums = self._sums, {}
        kept, self._kept = self._kept, {}
        names = sorted(sums.keys() | kept.keys())
        check_same_names(env, names)
        if not names:
            return PendingMeans([], [])
        if self.on_host:
            own = torch.tensor([sums[name] for name in names], dtype=torch.float64).flatten()
            return PendingMeans(names, env.sum(own).tolist())
        return PendingMeans(names, env.sum(torch.stack([part for name in names for part in self._reduce(*kept[name])])))

    def state_dict(self) -> dict[str, Any]:
        """What has been counted since the last read, every value for itself: a restored mean has the same bits."""
        self.flush()
        kept = {name: [self._vector(values), self._vector(weights)] for name, (values, weights) in self._kept.items()}
        held = self.task_metrics.state_dict() if self.task_metrics else {}
        counted = {"sums": {name: list(pair) for name, pair in self._sums.items()}, "kept": kept}
        return {**counted, "held": held} if held else counted

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a state; one from another kind of device is turned into this one's."""
        self.flush()
        if "by_rank" in state:
            self._load_by_rank(state["by_rank"])
            return
        if self.task_metrics:
            self.task_metrics.load_state_dict(state.get("held", {}))
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
        """Each rank its own; where there are more or fewer ranks now, rank 0 takes what all had counted."""
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
                "The run had %d ranks and has %d: what %s had accumulated since the last log is not taken over.",
                len(states),
                world,
                ", ".join(lost),
            )
        if rank == 0:
            together = Means(torch.device("cpu"))
            for state in states:
                part = Means(torch.device("cpu"))
                part.load_state_dict(state)
                for name, (total, mass) in part._sums.items():
                    held = together._sums.setdefault(name, [0.0, 0])
                    together._sums[name] = [held[0] + total, held[1] + mass]
            together._sums = {name: pair for name, pair in together._sums.items() if pair[1]}
            self.load_state_dict(together.state_dict())

    def _reduce(self, values: list[Any], weights: list[Any]) -> tuple[Tensor, Tensor]:
        value, weight = self._vector(values), self._vector(weights)
        # a weight of 0 drops its value, NaN or not
        return torch.where(weight == 0, 0, value * weight).sum(), weight.sum()

    def _vector(self, items: list[Any]) -> Tensor:
        if not any(isinstance(item, Tensor) for item in items):
            return torch.tensor(items, dtype=torch.float32).to(self.device, non_blocking=True)
        scalars = [i if isinstance(i, Tensor) else torch.tensor(float(i)) for i in items]
        return torch.stack([s.to(self.device, torch.float32, non_blocking=True).reshape(()) for s in scalars])


def check_same_names(env: Env, names: list[str]) -> None:
    """Refuse, by name, that ranks log different things: their sums would not fit together."""
    digest = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7])
    largest, negated = env.all_max([digest, -digest])
    if largest == -negated:
        return
    by_rank = [set(each) for each in env.gather(names)]
    odd = {rank: sorted(set.union(*by_rank) - each) for rank, each in enumerate(by_rank) if set.union(*by_rank) != each}
    told = "; ".join(f"rank {rank} has no {', '.join(missing[:3])}" for rank, missing in list(odd.items())[:4])
    raise TaskError(
        f"The ranks log different metrics: {told}. Every rank must return and record the same names at every update; "
        "give a metric that does not apply the weight 0, or return 0."
    )


class PendingMeans:
    """Means that have been asked for; `result()` waits for them if it must.

    `packed` holds a sum and a total weight per name. From a CUDA device it is copied to pinned memory without waiting.
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
        """Whether the values are on the host already."""
        return not isinstance(self._packed, Tensor)

    def result(self) -> dict[str, float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        flat = self._packed.tolist() if isinstance(self._packed, Tensor) else self._packed
        pairs = zip(self._names, flat[::2], flat[1::2], strict=True)
        return {name: float(total / mass) for name, total, mass in pairs if mass}


def check_scalars(metrics: Mapping[str, Any], where: str) -> None:
    """Refuse what cannot be averaged, by name."""
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
    return TaskError(
        f"The metric {name!r} has shape {tuple(value.shape)}; a metric is a scalar. Reduce it with .mean()."
    )


def _detached(name: str, value: Tensor) -> Tensor:
    """The value without its graph, safe against later changes in place (a parameter, a buffer, a view of one)."""
    if value.numel() != 1:
        raise _no_scalar(name, value)
    is_fresh = value.grad_fn is not None and not value._is_view()
    return value.detach() if is_fresh else value.detach().clone()
