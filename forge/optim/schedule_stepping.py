"""Learning-rate schedules: when each steps, and what a task may return as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from forge.errors import TaskError
from forge.progress import Interval, Position

HOW_TO_RETURN = (
    "Return an optimizer, (optimizer, schedule), (optimizer, schedule, '1 epoch'), or a dict of those by name: "
    '{"generator": ..., "discriminator": ...}.'
)


@dataclass(slots=True)
class ScheduledLR:
    """A learning-rate schedule and when it steps: per update, per interval, or by a metric after validation."""

    schedule: Any
    every: Interval | None = None
    monitor: str | None = None
    moved: bool = False
    "Whether its optimizer has stepped since this schedule last did."

    def advance(self, updated: bool, position: Position) -> None:
        """Step after an update, if the schedule is due and its optimizer has stepped since."""
        self.moved |= updated
        if self.monitor is None and self.moved and (self.every is None or self.every.due(position)):
            self.schedule.step()
            self.moved = False

    def after_validation(self, metrics: Mapping[str, Any]) -> None:
        """Step a schedule that watches a metric."""
        if self.monitor is None:
            return
        if self.monitor not in metrics:
            raise TaskError(
                f"A ReduceLROnPlateau watches {self.monitor!r}, but validation gave "
                f"{', '.join(sorted(metrics)) or 'nothing'}. Return (optimizer, schedule, metric)."
            )
        self.schedule.step(metrics[self.monitor])


def scheduled(schedule: Any, when: Any, optimizer: Optimizer, where: str) -> ScheduledLR:
    """Check a schedule that a task returned beside `optimizer`, and when it steps."""
    if not isinstance(schedule, (LRScheduler, ReduceLROnPlateau)) and not callable(getattr(schedule, "step", None)):
        raise TaskError(f"{where} returned {type(schedule).__name__} where a schedule belongs. {HOW_TO_RETURN}")
    driven = getattr(schedule, "optimizer", optimizer)
    # a wrapping optimizer may share its groups with the one inside
    if driven is not optimizer and getattr(driven, "param_groups", None) is not optimizer.param_groups:
        raise TaskError(f"{where}: the {type(schedule).__name__} drives another optimizer than the one beside it.")
    if isinstance(schedule, ReduceLROnPlateau):
        return ScheduledLR(schedule, monitor=str(when or "val/loss"))
    if callable(getattr(schedule, "step_update", None)):
        raise TaskError(
            f"{where} returned {type(schedule).__name__}, which must be told how far the run is, as timm's schedules. "
            "Take one of torch.optim.lr_scheduler: SequentialLR joins a warm-up and what follows."
        )
    return ScheduledLR(schedule, every=None if when is None else Interval(when))
