"""The learning-rate range test of Leslie Smith: raise the rate from update to update, and see where the loss falls.

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
"""The test ends where the smoothed loss is this many times its best, and above where it began."""
HARDLY = 0.02
"""A loss that falls by a smaller share than this says nothing about the rate."""


@dataclass(frozen=True, slots=True)
class LRCurve:
    """What a range test has measured: the rate and the loss of every update, and what follows from them."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    "The losses as an exponential mean, with the bias of its beginning taken out."
    reference: float
    "The rate that the task itself sets: that of the first parameter group of those that were tested."
    diverged: float | None = None
    "The rate at which the loss ran away and the test was ended; None where it came to its end."

    @property
    def suggestion(self) -> float:
        """A rate to train with, in two digits: a tenth of the one at which the smoothed loss was lowest.

        At the minimum itself the loss is about to rise again; a tenth of it is well inside of the range that works.
        """
        return float(rate_text(self.minimum / 10))

    @property
    def minimum(self) -> float:
        """The rate at which the smoothed loss was lowest."""
        return self.rates[self._first + _lowest(self.smoothed[self._first :])]

    @property
    def steepest(self) -> float:
        """The rate at which the smoothed loss fell fastest."""
        falls = [after - before for before, after in itertools.pairwise(self.smoothed[self._first :])]
        return self.rates[self._first + _lowest(falls)] if falls else self.rates[0]

    @property
    def valley(self) -> float:
        """The rate in the middle of the longest fall of the smoothed loss, as fastai does it: a careful choice."""
        length, end = longest_fall(self.smoothed)
        return self.rates[end - length // 2]

    @property
    def fell(self) -> bool:
        """Whether the loss fell by more than it moves from batch to batch: else the suggestion means nothing."""
        level = statistics.fmean(self.losses[: len(self.losses) // 4 + 1])
        steps = [abs(after - before) for before, after in itertools.pairwise(self.losses)]
        noise = statistics.median(steps) if steps else 0.0  # a fall or a blow-up is a few large steps
        return level - min(self.smoothed[self._first :]) > max(HARDLY * abs(level), 3 * noise)

    @property
    def _first(self) -> int:
        """The first few are a mean of too little to be taken for a fall."""
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
    """Train a task that `make_task` makes on `train`, with a rate that grows from `lowest` to `highest`.

    All parameter groups, and all optimizers, are scaled by one factor, so that their rates keep their ratios;
    `optimizer` names one to be tested alone while the others keep their rates. Schedules are left out. The test ends
    early where the loss runs away. Nothing is written. `trainer` is what `forge.Trainer` takes: `recipe`, `plugins`
    (of which those that only observe, save or guard are left out), `seed`, `device`.
    """
    if not 0 < lowest < highest:
        raise ForgeError(f"The range of learning rates from {lowest:g} to {highest:g} is empty: 0 < lowest < highest.")
    if updates < 10:
        raise ForgeError(f"{updates} updates are too few for a range test; take at least 10.")
    growth = (highest / lowest) ** (1 / (updates - 1))
    ramp = Ramp([lowest * growth**i for i in range(updates)], optimizer)
    run_trial(ramp, make_task, lambda: train, updates=updates, log_every=1, **trainer)
    return ramp.curve()


class Ramp(TuningTrial):
    """Give every update the next rate, and note its loss."""

    def __init__(self, rates: Sequence[float], optimizer: str | None = None):
        super().__init__()
        self.name = "forge.tuning.ramp"
        self.rates, self.only = rates, optimizer
        self.keep = 1 - 1 / (1 + len(rates) / 20)
        "How much of the smoothed loss stays from update to update: it looks back over a twentieth of the test."
        self.losses: list[float] = []
        self.diverged: float | None = None

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        super().forge_start(trainer)
        self.groups = self._groups(trainer.optimizers)
        self.own = [float(group["lr"]) for group in self.groups]
        if self.own[0] <= 0:
            raise TaskError(f"The first parameter group has a learning rate of {self.own[0]:g}: give it one above 0.")
        self.latest: dict[str, float] = {}
        self._set(0)

    def _groups(self, optimizers: Optimizers) -> list[dict[str, Any]]:
        if self.only is not None and self.only not in optimizers:
            names = [name for name in optimizers if name is not None]
            known = did_you_mean(self.only, names) if names else " The task has one optimizer, without a name."
            raise ForgeError(f"There is no optimizer {self.only!r}.{known}")
        chosen = [o for name, o in optimizers.items() if self.only in (None, name)]
        groups = [group for o in chosen for group in o.param_groups]
        if not all("lr" in group for group in groups):
            raise TaskError("An optimizer of this task has no learning rate: there is nothing to find.")
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
        # on an accelerator a loss arrives one update late, so a few more may come after the end
        loss = self._loss(metrics)
        if loss is None or self.diverged is not None:
            return
        if math.isfinite(loss):
            self.losses.append(loss)
        if not math.isfinite(loss) or ran_away(smooth(self.losses, self.keep)):
            self.diverged = self.rates[update - 1]
            trainer.max_updates = trainer.progress.update

    def _loss(self, metrics: Mapping[str, Any]) -> float | None:
        """This update's loss; with several optimizers the mean of their latest ones, because they may take turns."""
        wanted = "train/loss" if self.only is None else f"train/{self.only}/loss"
        found = {name: value for name, value in metrics.items() if _is_loss(name) and (not self.only or name == wanted)}
        self.latest |= found
        return sum(self.latest.values()) / len(self.latest) if found else None

    def curve(self) -> LRCurve:
        """What was measured."""
        if not self.losses:
            raise ForgeError(
                f"The loss is not finite at the lowest rate, {self.rates[0]:g}, already: this is no matter of the rate."
            )
        rates, smoothed = list(self.rates[: len(self.losses)]), smooth(self.losses, self.keep)
        return LRCurve(rates, self.losses, smoothed, self.own[0], self.diverged)


def _is_loss(name: str) -> bool:
    return name.startswith("train/") and name.endswith("/loss") and name.count("/") <= 2


def ran_away(smoothed: Sequence[float]) -> bool:
    """Whether the smoothed loss is far above its best, and above where it began: small losses may wobble."""
    best, last = min(smoothed), smoothed[-1]
    return last > smoothed[0] and last - best > (DIVERGED - 1) * abs(best)


def smooth(losses: Sequence[float], keep: float) -> list[float]:
    """Exponential mean; each value is divided by the weight that it has so far, so that it begins at the first loss."""
    mean, smoothed = 0.0, []
    for i, loss in enumerate(losses, 1):
        mean = keep * mean + (1 - keep) * loss
        smoothed.append(mean / (1 - keep**i))
    return smoothed


def longest_fall(losses: Sequence[float]) -> tuple[int, int]:
    """(length, index of the last) of the longest subsequence in which every loss is lower than the one before."""
    length = [1] * len(losses)
    for i, loss in enumerate(losses):
        length[i] += max((length[j] for j in range(i) if losses[j] > loss), default=0)
    return max(length), length.index(max(length))


def rate_text(rate: float) -> str:
    """A rate in two digits, as one would type it: 2.2e-3, 0.05."""
    if 0.01 <= rate < 100:
        return f"{rate:.2g}"
    digits, _, exponent = f"{rate:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def _lowest(values: Sequence[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)
