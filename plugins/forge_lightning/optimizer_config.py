"""Convert the result of a LightningModule's configure_optimizers, in all of Lightning's forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from forge.errors import TaskError
from forge.optim.schedule_stepping import ScheduledLR
from forge.progress import Interval, Position

KEYS = {"scheduler", "interval", "frequency", "monitor", "reduce_on_plateau", "strict", "name"}
"""Keys of Lightning's lr_scheduler config; `name` is for its LearningRateMonitor."""


@dataclass
class SchedulerConfig:
    """Lightning's LRSchedulerConfig: a scheduler, and when it steps."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True
    name: str | None = None


def read(returned: Any, where: str, manual: bool = False) -> tuple[list[Any], list[SchedulerConfig]]:
    """Return the optimizers and the configs of their schedulers; raise TaskError for other forms."""
    optimizers, schedulers, monitor = _split(returned, where)
    configs = [_config(item, None if manual else monitor, where, manual) for item in schedulers]
    if len(optimizers) > 1 and not manual:
        raise TaskError(
            f"{where} returned {len(optimizers)} optimizers, which Lightning too runs with manual optimization only: "
            "set self.automatic_optimization = False, and step them in training_step."
        )
    for config in configs:
        _refuse_other_optimizer(config.scheduler, optimizers, where)
    return optimizers, configs


def _split(returned: Any, where: str) -> tuple[list[Any], list[Any], str | None]:
    if returned is None:
        return [], [], None
    if _is_optimizer(returned):
        return [returned], [], None
    if isinstance(returned, Mapping):
        return [_optimizer_of(returned, where)], _scheduler_of(returned), returned.get("monitor")
    if isinstance(returned, (list, tuple)):
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)) and all(map(_is_optimizer, returned[0])):
            optimizers, schedulers = returned
            return list(optimizers), list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers], None
        if all(isinstance(item, Mapping) for item in returned):
            pairs = [(_optimizer_of(item, where), _scheduler_of(item), item.get("monitor")) for item in returned]
            monitors = [monitor for _, _, monitor in pairs if monitor is not None]
            return [p[0] for p in pairs], [one for p in pairs for one in p[1]], monitors[0] if monitors else None
        if all(map(_is_optimizer, returned)):
            return list(returned), [], None
    raise TaskError(
        f"{where} returned {type(returned).__name__}; forge needs an optimizer, ([optimizer], [scheduler]), or a dict "
        "with 'optimizer' and 'lr_scheduler', as Lightning does."
    )


def _is_optimizer(value: Any) -> bool:
    methods = ("step", "zero_grad", "state_dict", "load_state_dict")
    is_alike = hasattr(value, "param_groups") and all(callable(getattr(value, name, None)) for name in methods)
    return isinstance(value, Optimizer) or is_alike


def _optimizer_of(returned: Mapping[str, Any], where: str) -> Any:
    if not _is_optimizer(returned.get("optimizer")):
        raise TaskError(f"{where} returned a dict without an optimizer under 'optimizer'.")
    odd = sorted(returned.keys() - {"optimizer", "lr_scheduler", "monitor"})
    if odd:
        warnings.warn(f"{where} returned {', '.join(map(repr, odd))} in its dict, which has no effect.", stacklevel=4)
    return returned["optimizer"]


def _scheduler_of(returned: Mapping[str, Any]) -> list[Any]:
    return [] if returned.get("lr_scheduler") is None else [returned["lr_scheduler"]]


def _config(item: Any, monitor: str | None, where: str, manual: bool) -> SchedulerConfig:
    given = dict(item) if isinstance(item, Mapping) else {"scheduler": item}
    if "scheduler" not in given:
        raise TaskError(f"{where}: no 'scheduler' in an lr_scheduler config. It takes {', '.join(sorted(KEYS))}.")
    odd = sorted(given.keys() - KEYS)
    if odd:
        warnings.warn(f"{where}: {', '.join(map(repr, odd))} in an lr_scheduler config has no effect.", stacklevel=5)
    known = {key: value for key, value in given.items() if key in KEYS}
    scheduler = known["scheduler"]
    known.setdefault("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    known.setdefault("monitor", monitor)
    config = SchedulerConfig(**known)
    if manual:
        return config
    if config.interval not in ("step", "epoch"):
        raise TaskError(f"{where}: interval is {config.interval!r}; it must be 'step' or 'epoch'.")
    if config.reduce_on_plateau and config.monitor is None:
        raise TaskError(f"{where}: the config of a ReduceLROnPlateau has no 'monitor'.")
    if isinstance(scheduler, OneCycleLR) and config.interval == "epoch":
        warnings.warn(f"{where}: a OneCycleLR steps once per epoch; set 'interval': 'step'.", stacklevel=5)
    return config


def _refuse_other_optimizer(scheduler: Any, optimizers: list[Any], where: str) -> None:
    if not all(callable(getattr(scheduler, name, None)) for name in ("state_dict", "load_state_dict")):
        raise TaskError(f"{where}: {type(scheduler).__name__} has no state_dict and load_state_dict of a scheduler.")
    driven = getattr(scheduler, "optimizer", None)
    # a wrapping optimizer may share its groups with the one inside
    groups = [getattr(optimizer, "param_groups", None) for optimizer in optimizers]
    if not any(driven is one for one in optimizers) and not any(
        getattr(driven, "param_groups", groups) is group for group in groups
    ):
        raise TaskError(
            f"{where}: the {type(scheduler).__name__} drives an optimizer that is not returned. Return the optimizer "
            "that it was made with."
        )


def refuse_foreign_api(config: SchedulerConfig, where: str) -> None:
    """Raise TaskError for a scheduler that is not torch's, unless the module's lr_scheduler_step steps it."""
    if not isinstance(config.scheduler, (LRScheduler, ReduceLROnPlateau)):
        raise TaskError(
            f"{where}: {type(config.scheduler).__name__} is not a scheduler of torch's, so how to step it is unknown. "
            "Define lr_scheduler_step(self, scheduler, metric) in the module."
        )


def schedule_of(config: SchedulerConfig, position: Callable[[], int], stepped: Any) -> ScheduledLR:
    """Convert a config to forge's ScheduledLR. `position` returns how many batches of the epoch were done before this
    update; `stepped` wraps a scheduler in the module's lr_scheduler_step, if it defines one. A scheduler that watches a
    metric is stepped by the adapter."""
    if config.reduce_on_plateau:
        return ScheduledLR(stepped(config.scheduler), every=Never())
    frequency = int(config.frequency)
    if config.interval == "epoch":
        return ScheduledLR(stepped(config.scheduler), every=Interval(f"{frequency} epochs"))
    return ScheduledLR(stepped(config.scheduler), every=None if frequency == 1 else WithinEpoch(frequency, position))


class WithinEpoch(Interval):
    """Every n batches, counted from the start of each epoch, as in Lightning."""

    __slots__ = ("_position",)

    def __init__(self, batches: int, position: Callable[[], int]):
        super().__init__(f"{batches} updates")
        self._position = position

    def due(self, step: Position) -> bool:
        return (self._position() + len(step.window)) % self.count == 0


class Never(Interval):
    """Not by itself: something else steps the schedule."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("1 update")

    def due(self, step: Position) -> bool:
        return False


class OwnStep:
    """A scheduler that is stepped by the module's lr_scheduler_step."""

    def __init__(self, scheduler: Any, step: Callable[[Any, Any], None]):
        self.scheduler, self._step = scheduler, step

    def step(self, metric: float | None = None) -> None:
        self._step(self.scheduler, metric)

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scheduler.load_state_dict(state)
