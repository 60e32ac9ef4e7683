"""Convert the result of a LightningModule's configure_optimizers, in all of Lightning's forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from forge.errors import TaskError
from forge.optim.schedule_stepping import ScheduledLR
from forge.progress import Interval, Position
from forge_lightning.names import monitored

KEYS = {"scheduler", "interval", "frequency", "monitor", "reduce_on_plateau", "strict", "name"}
"""Keys of Lightning's lr_scheduler config; `name` is for its LearningRateMonitor."""

Config = dict[str, Any]


def read(returned: Any, where: str) -> tuple[Optimizer, list[Config]]:
    """Return the optimizer and the configs of its schedules; raise TaskError for other forms."""
    if isinstance(returned, Optimizer):
        return returned, []
    if isinstance(returned, Mapping):
        return _from_dict(returned, where)
    if isinstance(returned, (list, tuple)):
        if len(returned) == 2 and all(isinstance(part, (list, tuple)) for part in returned):
            optimizers, schedules = returned
            return _only(optimizers, where), [_config(item, where) for item in schedules]
        only = _only(returned, where)
        return read(only, where) if isinstance(only, Mapping) else (only, [])
    raise TaskError(f"{where} returned {type(returned).__name__}; forge needs an optimizer to train with.")


def _only(optimizers: Any, where: str) -> Any:
    if len(optimizers) != 1:
        raise TaskError(
            f"{where} returned {len(optimizers)} optimizers, which Lightning runs with manual optimization only. Write "
            "a forge.TaskModule whose configure_optimizers returns a dict of them by name (docs/from-lightning.md)."
        )
    return optimizers[0]


def _from_dict(returned: Mapping[str, Any], where: str) -> tuple[Optimizer, list[Config]]:
    if not isinstance(returned.get("optimizer"), Optimizer):
        raise TaskError(f"{where} returned a dict without an optimizer under 'optimizer'.")
    if "lr_scheduler" not in returned:
        return returned["optimizer"], []
    config = _config(returned["lr_scheduler"], where)
    if "monitor" in returned:
        config.setdefault("monitor", returned["monitor"])
    return returned["optimizer"], [config]


def _config(item: Any, where: str) -> Config:
    config = dict(item) if isinstance(item, Mapping) else {"scheduler": item}
    odd = sorted(config.keys() - KEYS)
    if odd or "scheduler" not in config:
        missing = f"{', '.join(map(repr, odd))} in" if odd else "no 'scheduler' in"
        raise TaskError(f"{where}: {missing} an lr_scheduler config. It takes {', '.join(sorted(KEYS))}.")
    if config.get("interval", "epoch") not in ("step", "epoch"):
        raise TaskError(f"{where}: interval is {config['interval']!r}; it must be 'step' or 'epoch'.")
    return config


def schedule_of(config: Config, where: str, position: Callable[[], int], stepped: Any) -> ScheduledLR:
    """Convert a config to forge's ScheduledLR. `position` returns how many batches of the epoch were done before this
    update; `stepped` wraps a scheduler in the module's lr_scheduler_step, if it defines one."""
    scheduler = config["scheduler"]
    by_metric = config.get("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    interval, frequency = config.get("interval", "epoch"), int(config.get("frequency", 1))
    if by_metric:
        return ScheduledLR(stepped(scheduler), monitor=_monitor(config, where, interval, frequency))
    if interval == "epoch":
        return ScheduledLR(stepped(scheduler), every=Interval(f"{frequency} epochs"))
    return ScheduledLR(stepped(scheduler), every=None if frequency == 1 else WithinEpoch(frequency, position))


def _monitor(config: Config, where: str, interval: str, frequency: int) -> str:
    if config.get("monitor") is None:
        raise TaskError(f"{where}: the config of a ReduceLROnPlateau has no 'monitor'.")
    if (interval, frequency) != ("epoch", 1):
        raise TaskError(
            f"{where}: a ReduceLROnPlateau has interval {interval!r} and frequency {frequency}; forge steps it after "
            "each validation. Remove both, and set Trainer(validate_every=...)."
        )
    name = monitored(str(config["monitor"]))
    if name is None:
        raise TaskError(
            f"{where}: a ReduceLROnPlateau monitors {config['monitor']!r}, a training metric, but forge steps it after "
            "each validation. Log a metric in validation_step, and monitor that."
        )
    return name


class WithinEpoch(Interval):
    """Every n batches, counted from the start of each epoch, as in Lightning."""

    __slots__ = ("_position",)

    def __init__(self, batches: int, position: Callable[[], int]):
        super().__init__(f"{batches} updates")
        self._position = position

    def due(self, step: Position) -> bool:
        return (self._position() + len(step.window)) % self.count == 0


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
