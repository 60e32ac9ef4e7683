"""The learning-rate range test of Leslie Smith: raise the rate from update to update, and record the loss.

::

    curve = forge.tuning.lr_range(MyTask, train)
    task = MyTask(lr=curve.suggestion)
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.contract.hooks import hookimpl
from forge.contract.step import Step
from forge.contract.task import TaskModule
from forge.engine.trainer import Trainer
from forge.errors import ForgeError, TaskError, did_you_mean
from forge.optim.optimizers import Optimizers
from forge.tuning.trial import TuningTrial, run_trial, set_rate

DIVERGED = 4.0
"""The test ends when the smoothed loss is this many times its best, and above its first value."""
HARDLY = 0.02
"""A loss that falls by less than this share gives no information about the rate."""


@dataclass(frozen=True, slots=True)
class LRCurve:
    """The result of a range test: the rate and the loss of every update, and the conclusions."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    "The losses as an exponential mean with bias correction."
    reference: float
    "The task's own rate of the first parameter group that was tested."
    diverged: float | None = None
    "The rate at which the loss diverged and the test ended; None if it did not diverge."
    own: tuple[float, ...] = ()
    "The task's own rates, by parameter group; all were scaled by one factor, and `rates` are those of the first."

    @property
    def suggestion(self) -> float:
        """Return a rate to train with, in two digits: a tenth of the rate at which the smoothed loss was lowest.

        At the minimum itself the loss is about to rise again; a tenth of it is well inside the range that works.
        """
        return float(rate_text(self.minimum / 10))

    @property
    def minimum(self) -> float:
        """Return the rate at which the smoothed loss was lowest."""
        return self.rates[self._first + _lowest(self.smoothed[self._first :])]

    @property
    def steepest(self) -> float:
        """Return the rate at which the smoothed loss fell fastest."""
        falls = [after - before for before, after in itertools.pairwise(self.smoothed[self._first :])]
        return self.rates[self._first + _lowest(falls)] if falls else self.rates[0]

    @property
    def valley(self) -> float:
        """Return the rate in the middle of the longest fall of the smoothed loss, as in fastai: a careful choice."""
        length, end = longest_fall(self.smoothed)
        return self.rates[end - length // 2]

    @property
    def fell(self) -> bool:
        """Return whether the loss fell by more than its noise between batches; else the suggestion means nothing."""
        level = statistics.fmean(self.losses[: len(self.losses) // 4 + 1])
        steps = [abs(after - before) for before, after in itertools.pairwise(self.losses)]
        noise = statistics.median(steps) if steps else 0.0  # a fall or a blow-up is a few large steps
        return level - min(self.smoothed[self._first :]) > max(HARDLY * abs(level), 3 * noise)

    @property
    def _first(self) -> int:
        """Return the first index to use: earlier means are over too few losses."""
        return len(self.smoothed) // 10


def lr_range(
    make_task: Callable[[], TaskModule],
    train: Any,
    *,
    lowest: float = 1e-7,
    highest: float = 10.0,
    updates: int = 100,
    optimizer: str | None = None,
    **trainer: Any,
) -> LRCurve:
    """Train a fresh task from `make_task` on `train`, with a rate that grows from `lowest` to `highest`.

    All parameter groups of all optimizers are scaled by one factor, so that their rates keep their ratios; `optimizer`
    names one to test alone while the others keep their rates. Schedules are left out. The test ends early if the loss
    diverges. Nothing is written. `trainer` are arguments of `forge.Trainer`: `recipe`, `plugins` (those that only
    observe, save or guard are left out), `seed`, `device`.
    """
    if not 0 < lowest < highest:
        raise ForgeError(f"The range of learning rates from {lowest:g} to {highest:g} is empty: 0 < lowest < highest.")
    if updates < 10:
        raise ForgeError(f"{updates} updates are too few for a range test; use at least 10.")
    growth = (highest / lowest) ** (1 / (updates - 1))
    ramp = Ramp([lowest * growth**i for i in range(updates)], optimizer)
    run_trial(ramp, make_task, lambda: train, updates=updates, log_every=1, **trainer)
    return ramp.curve()


class Ramp(TuningTrial):
    """Give every update the next rate, and record its loss."""

    def __init__(self, rates: Sequence[float], optimizer: str | None = None):
        super().__init__()
        self.name = "forge.tuning.ramp"
        self.rates, self.only = rates, optimizer
        self.keep = 1 - 1 / (1 + len(rates) / 20)
        "Decay of the smoothed loss, over a twentieth of the test."
        self.losses: list[float] = []
        self.diverged: float | None = None

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        super().forge_start(trainer)
        self.groups = self._groups(trainer.optimizers)
        self.own = [float(group["lr"]) for group in self.groups]
        if self.own[0] <= 0:
            raise TaskError(f"The first parameter group has a learning rate of {self.own[0]:g}: set one above 0.")
        self.latest: dict[str, float] = {}
        self._set(0)

    def _groups(self, optimizers: Optimizers) -> list[dict[str, Any]]:
        if self.only is not None and self.only not in optimizers:
            names = [name for name in optimizers if name is not None]
            known = did_you_mean(self.only, names) if names else " The task has one optimizer, without a name."
            raise ForgeError(f"No optimizer {self.only!r}.{known}")
        chosen = [o for name, o in optimizers.items() if self.only in (None, name)]
        groups = [group for o in chosen for group in o.param_groups]
        if not all("lr" in group for group in groups):
            raise TaskError("An optimizer of this task has no learning rate, so no rate can be tested.")
        return groups

    def _set(self, update: int) -> None:
        for group, own in zip(self.groups, self.own, strict=True):
            set_rate(group, self.rates[update] * own / self.own[0])

    @hookimpl
    def forge_step_end(self, step: Step) -> None:
        if step.index + 1 < len(self.rates):
            self._set(step.index + 1)

    @hookimpl
    def forge_log(self, trainer: Trainer, update: int, metrics: dict[str, Any]) -> None:
        # on an accelerator a loss arrives one update late, so a few more may arrive after the end
        loss = self._loss(metrics)
        if loss is None or self.diverged is not None:
            return
        if math.isfinite(loss):
            self.losses.append(loss)
        if not math.isfinite(loss) or has_diverged(smooth(self.losses, self.keep)):
            self.diverged = self.rates[update - 1]
            trainer.max_updates = trainer.progress.update

    def _loss(self, metrics: Mapping[str, Any]) -> float | None:
        """Return this update's loss; with several optimizers, which may take turns, the mean of their latest losses."""
        wanted = "train/loss" if self.only is None else f"train/{self.only}/loss"
        found = {name: value for name, value in metrics.items() if _is_loss(name) and (not self.only or name == wanted)}
        self.latest |= found
        return sum(self.latest.values()) / len(self.latest) if found else None

    def curve(self) -> LRCurve:
        if not self.losses:
            raise ForgeError(
                f"The loss is not finite at the lowest rate, {self.rates[0]:g}, so the learning rate is not the cause."
            )
        rates, smoothed = list(self.rates[: len(self.losses)]), smooth(self.losses, self.keep)
        return LRCurve(rates, self.losses, smoothed, self.own[0], self.diverged, tuple(self.own))


def _is_loss(name: str) -> bool:
    return name.startswith("train/") and name.endswith("/loss") and name.count("/") <= 2


def has_diverged(smoothed: Sequence[float]) -> bool:
    """Return whether the smoothed loss is far above its best and above its first value; small losses may fluctuate."""
    best, last = min(smoothed), smoothed[-1]
    return last > smoothed[0] and last - best > (DIVERGED - 1) * abs(best)


def smooth(losses: Sequence[float], keep: float) -> list[float]:
    """Return the exponential mean with bias correction."""
    mean, smoothed = 0.0, []
    for i, loss in enumerate(losses, 1):
        mean = keep * mean + (1 - keep) * loss
        smoothed.append(mean / (1 - keep**i))
    return smoothed


def longest_fall(losses: Sequence[float]) -> tuple[int, int]:
    """Return (length, last index) of the longest subsequence of falling losses."""
    length = [1] * len(losses)
    for i, loss in enumerate(losses):
        length[i] += max((length[j] for j in range(i) if losses[j] > loss), default=0)
    return max(length), length.index(max(length))


def rate_text(rate: float) -> str:
    """Write a rate in two digits: 2.2e-3, 0.05."""
    if 0.01 <= rate < 100:
        return f"{rate:.2g}"
    digits, _, exponent = f"{rate:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def _lowest(values: Sequence[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)
