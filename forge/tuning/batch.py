"""Measure the largest batch that fits into memory, and the speed of each size.

::

    report = forge.tuning.batch_range(MyTask, lambda size: make_loader(batch_size=size), start=64)
    print(report.largest, report.recommended)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from forge.contract.hooks import hookimpl
from forge.contract.step import Step
from forge.contract.task import TaskModule
from forge.data.accumulation_windows import batch_size
from forge.engine.trainer import Trainer
from forge.errors import ForgeError
from forge.tuning.trial import TuningTrial, run_trial
from forge.util import peak_memory
from forge.util.oom import is_out_of_memory

WARM_UP = 2
"""Updates before the timing starts: the first makes the optimizer's state, the second reaches the peak of memory."""
MIN_SECONDS, MAX_UPDATES = 0.25, 200
"""Fast updates are repeated for at least so many seconds, and at most so often."""
NEAR = 0.97
"""A smaller batch is recommended if it reaches this share of the best speed."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one batch size."""

    size: int
    why_not: str = ""
    "Why the size does not work; empty if it does."
    memory: int | None = None
    "Peak bytes of the device, or of the whole process on a CPU."
    speed: float = 0.0
    "Samples per second."

    @property
    def fits(self) -> bool:
        return not self.why_not

    @property
    def is_round(self) -> bool:
        """Return whether the size is a power of two, which suits kernels best."""
        return self.size == power_below(self.size)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """All probes, and the conclusions."""

    probes: list[Probe]
    "Ordered by size."

    @property
    def largest(self) -> int:
        """Return the largest size that works."""
        return max(probe.size for probe in self.probes if probe.fits)

    @property
    def too_large(self) -> Probe | None:
        """Return the smallest size above `largest` that does not work; None if every probe works."""
        return next((probe for probe in self.probes if probe.size > self.largest), None)

    @property
    def fastest(self) -> Probe:
        """Return the power of two with the most samples per second."""
        return max((probe for probe in self.probes if probe.fits and probe.is_round), key=lambda probe: probe.speed)

    @property
    def recommended(self) -> int:
        """Return the smallest power of two that is nearly as fast as the fastest: a larger batch only costs updates."""
        return next(p.size for p in self.probes if p.fits and p.is_round and p.speed >= NEAR * self.fastest.speed)


def batch_range(
    make_task: Callable[[], TaskModule],
    make_train: Callable[[int], Any],
    *,
    start: int = 32,
    highest: int = 8192,
    exact: bool = False,
    limit: float | None = None,
    updates: int = 6,
    tell: Callable[[Probe], None] = lambda probe: None,
    **trainer: Any,
) -> BatchReport:
    """Find the largest batch that trains: double from `start` until memory is full, or halve until it is not.

    Every size gets a fresh task from `make_task`, a fresh loader from `make_train(size)`, and some real updates. Sizes
    are powers of two; `exact` searches between the last two. `limit` is a budget in GB, of the device or of this
    process on a CPU; without one a CPU fills up to the machine's memory, so choose `highest` with care there. `tell` is
    called with each result. `trainer` are arguments of `forge.Trainer`: `recipe`, `plugins` (those that only observe,
    save or guard are left out), `seed`, `device`.
    """
    for name, value, least in (("start", start, 1), ("highest", highest, 1), ("updates", updates, WARM_UP + 1)):
        if value < least:
            raise ForgeError(f"{name}={value}: it must be at least {least}.")
    budget = None if limit is None else int(limit * 1e9)
    tried: dict[int, Probe] = {}
    peak_memory.clean()

    def works(size: int) -> bool:
        if size not in tried:
            # an error of the first size, other than memory, has another cause; later errors come from the size
            tried[size] = probe_size(size, make_task, make_train, updates, budget, may_fail=bool(tried), **trainer)
            tell(tried[size])
        return tried[size].fits

    if not largest_that(works, start, highest, exact):
        last = tried[min(tried)]
        raise ForgeError(f"Not even a batch of {last.size} fits: {last.why_not}.")
    return BatchReport([tried[size] for size in sorted(tried)])


def largest_that(works: Callable[[int], bool], start: int, highest: int, exact: bool = False) -> int:
    """Return the largest size up to `highest` that works, 0 if none does; every smaller size must work too.

    Powers of two only, unless `exact`. The search begins at or below `start`.
    """
    size = power_below(min(start, highest))
    while size and not works(size):
        size //= 2
    while size and size * 2 <= highest and works(size * 2):
        size *= 2
    if not exact or not size:
        return size
    good, bad = size, min(size * 2, highest + 1)  # the upper end is known to fail, or above `highest`
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if works(middle) else (good, middle)
    return good


def power_below(size: int) -> int:
    """Return the largest power of two up to a size."""
    return 1 << (size.bit_length() - 1)


def probe_size(
    size: int,
    make_task: Callable[[], TaskModule],
    make_train: Callable[[int], Any],
    updates: int,
    budget: int | None = None,
    may_fail: bool = False,
    **trainer: Any,
) -> Probe:
    """Train with batches of this size for some updates. With `may_fail` any error means that the size fails."""
    timer = Timer(size, updates)
    why_not = ""
    try:
        run_trial(timer, make_task, lambda: make_train(size), updates=max(updates, MAX_UPDATES), **trainer)
    except Exception as error:
        if not (is_out_of_memory(error) or may_fail):
            raise
        why_not = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {_first_line(error)}"
    peak = timer.peak()
    if not why_not and timer.short is not None:
        why_not = f"the data yielded a batch of only {timer.short}"
    if not why_not and budget is not None and peak is not None and peak > budget:
        why_not = f"over the limit of {budget / 1e9:g} GB"
    speed = timer.speed
    del timer  # it still references parts of the task
    peak_memory.clean()
    return Probe(size, why_not, peak, speed)


class Timer(TuningTrial):
    """Time the updates after the warm-up, and check that batches have the requested size."""

    def __init__(self, size: int, updates: int):
        super().__init__()
        self.name = "forge.tuning.timer"
        self.size, self.updates = size, updates
        self.short: int | None = None
        "The size of the first batch, if it is smaller than requested."
        self.speed = 0.0
        self.device: torch.device | None = None
        self.began, self.samples = 0.0, 0

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        super().forge_start(trainer)
        self.device = trainer.env.device
        peak_memory.start(self.device)

    @hookimpl
    def forge_step_end(self, step: Step) -> None:
        update, trainer = step.index + 1, step.trainer
        if update == 1:
            got = batch_size(step.window[0])
            self.short = got if got is not None and got < self.size else None
        if self.short is not None:
            trainer.max_updates = update
        if update < WARM_UP:
            return
        trainer.env.synchronize()
        now = time.perf_counter()
        if update == WARM_UP:
            self.began = now
            return
        self.samples += step.samples
        self.speed = self.samples / (now - self.began)
        if update >= self.updates and now - self.began >= MIN_SECONDS:
            trainer.max_updates = update

    def peak(self) -> int | None:
        """Return the peak bytes since the run began; None if it did not begin."""
        return None if self.device is None else peak_memory.peak(self.device)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
