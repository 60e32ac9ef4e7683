"""workers_range: measure how many samples a second a loader gives with each number of workers, and the step's need."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset

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
class WorkersProbe:
    """One number of workers."""

    workers: int
    speed: float
    "Samples per second."


@dataclass(frozen=True, slots=True)
class WorkersReport:
    """Speed of the data by number of workers, against the step's need."""

    probes: list[WorkersProbe]
    need: float
    "Samples per second that the step takes with batches in memory."
    step_ms: float
    samples: float
    "Samples of a batch, on average."

    @property
    def best(self) -> WorkersProbe:
        """The fastest."""
        return max(self.probes, key=lambda probe: probe.speed)

    @property
    def recommended(self) -> WorkersProbe:
        """The fewest workers that feed the step; else the fewest that are nearly as fast as the best."""
        enough = min(ROOM * self.need, NEAR * self.best.speed)
        return next(probe for probe in self.probes if probe.speed >= enough)

    @property
    def limit(self) -> Literal["data", "compute"]:
        """What limits training with the recommended number of workers."""
        return "compute" if self.recommended.speed >= ROOM * self.need else "data"


def workers_range(
    make_task: Callable[[], TaskModule],
    make_train: Callable[[int], Any],
    *,
    counts: Sequence[int] | None = None,
    seconds: float = SECONDS,
    tell: Callable[[WorkersProbe], Any] = lambda probe: None,
    seed: int = 0,
    **options: Any,
) -> WorkersReport:
    """Measure the loader of `make_train(workers)` for each of `counts` (default: 0, 1, 2, 4 … up to the cores), and
    the step of a fresh task with batches that are in memory. `options` go to the Trainer; nothing is written."""
    counts = list(counts) if counts is not None else default_counts(available_cores())
    probes: list[WorkersProbe] = []
    held: list[Any] = []
    for number, count in enumerate(counts):
        probe = _measure(make_train(count), count, number, seconds, held, seed)
        probes.append(probe)
        tell(probe)
    samples = sum(map(_samples, held)) / len(held)
    timer = StepTimer()
    run_trial(timer, make_task, lambda: held, updates=timer.most, **options)
    ms = timer.reading(timer.weights).ms
    return WorkersReport(probes, 1000 * samples / ms, ms, samples)


def default_counts(cores: int) -> list[int]:
    """Return 0, 1, 2, 4 … and the number of cores."""
    return sorted({0, cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)})


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def with_workers(loader: Any, workers: int) -> Any:
    """Return a DataLoader over the same dataset with another number of workers; None for any other loader."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    options: dict[str, Any] = {"collate_fn": loader.collate_fn, "pin_memory": loader.pin_memory}
    if workers:
        options["multiprocessing_context"] = loader.multiprocessing_context
        options["worker_init_fn"] = loader.worker_init_fn
    if isinstance(loader.dataset, IterableDataset):
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        options["batch_sampler"] = loader.batch_sampler
    else:
        options |= {"batch_size": None, "sampler": loader.sampler}
    return DataLoader(loader.dataset, num_workers=workers, generator=loader.generator, **options)


# -- one measurement --------------------------------------------------------------------------------------------------


def _measure(given: Any, workers: int, number: int, seconds: float, held: list[Any], seed: int) -> WorkersProbe:
    loader = adopt(by_name(given, "train"), "train")
    if hasattr(loader, "set_default_seed"):
        loader.set_default_seed(seed)
    # other samples first than in the measurement before, which the page cache would hold
    stream = _endless(loader, number)
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
    return WorkersProbe(workers, samples / elapsed)


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
