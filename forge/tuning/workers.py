"""workers_range: measure how many samples a second a loader gives with each number of workers, and the step's need."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge.contract.task import TaskModule
from forge.data import batch_size
from forge.data.adapt import adopt, by_name
from forge.errors import DataError, ForgeError
from forge.tuning.step_timer import StepTimer
from forge.tuning.trial import run_trial

OPTIONS = ("workers", "num_workers")
"""Names of the option of a data function that sets the number of worker processes."""
SECONDS = 2.0
"""The least seconds of a measurement."""
LEAST = 3
"""The least batches of a measurement."""
HELD = 8
"""Batches that are kept in memory, to time the step without its data."""
ROOM = 1.1
"""Data must come this much faster than the step needs them, or they count as its limit."""
NEAR = 0.95
"""This share of the best speed is as good."""


@dataclass(frozen=True, slots=True)
class WorkersReport:
    """Speed of the data by number of workers, against the step's need."""

    speeds: dict[int, float]
    "Samples per second by number of workers."
    need: float
    "Samples per second that the step takes with batches in memory."
    step_ms: float
    samples: float
    "Samples of a batch, on average."

    @property
    def recommended(self) -> int:
        """The fewest workers that feed the step; else the fewest that are nearly as fast as the best."""
        enough = min(ROOM * self.need, NEAR * max(self.speeds.values()))
        return min(count for count, speed in self.speeds.items() if speed >= enough)

    @property
    def limit(self) -> Literal["data", "compute"]:
        """What limits training with the recommended number of workers."""
        return "compute" if self.speeds[self.recommended] >= ROOM * self.need else "data"


def workers_range(
    make_task: Callable[[], TaskModule],
    make_train: Callable[[int], Any],
    *,
    counts: Sequence[int] | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
    **options: Any,
) -> WorkersReport:
    """Measure the loader of `make_train(workers)` for each of `counts` (default: 0, 1, 2, 4 … up to the cores), and
    the step of a fresh task with batches that are in memory. `options` go to the Trainer; nothing is written."""
    counts = list(counts) if counts is not None else default_counts(available_cores())
    held: list[Any] = []
    # each begins with other samples than the one before, which the page cache would hold
    speeds = {count: _speed(make_train(count), count, epoch, seconds, held, seed) for epoch, count in enumerate(counts)}
    samples = sum(map(_samples, held)) / len(held)
    timer = StepTimer()
    run_trial(timer, make_task, lambda: held, updates=timer.most, **options)
    ms = timer.reading(timer.weights).ms
    return WorkersReport(speeds, 1000 * samples / ms, ms, samples)


def default_counts(cores: int) -> list[int]:
    """Return 0, 1, 2, 4 … and the number of cores."""
    return sorted({0, cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)})


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- one measurement --------------------------------------------------------------------------------------------------


def _speed(given: Any, workers: int, epoch: int, seconds: float, held: list[Any], seed: int) -> float:
    """Return samples per second; keep the first batches in `held`."""
    loader = adopt(by_name(given, "train"), "train")
    if hasattr(loader, "set_default_seed"):
        loader.set_default_seed(seed)
    stream = _endless(loader, epoch)
    for _ in range(2 * workers + 1):  # until the workers run, and what they fetched ahead is used up
        batch = next(stream)
        if len(held) < HELD:
            held.append(batch)
    began = time.perf_counter()
    samples = batches = 0
    while batches < LEAST or time.perf_counter() - began < seconds:
        samples += _samples(next(stream))
        batches += 1
    elapsed = time.perf_counter() - began
    stream.close()
    return samples / elapsed


def _endless(loader: Any, epoch: int) -> Generator[Any, None, None]:
    """Yield the batches of one epoch after the other."""
    while True:
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        epoch += 1
        found = False
        for batch in loader:
            found = True
            yield batch
        if not found:
            raise DataError("The train loader gives no batch. Is its dataset empty, or drop_last on with few samples?")


def _samples(batch: Any) -> int:
    try:
        return batch_size(batch) or 1
    except ForgeError:
        return 1  # a batch without a size counts as one
