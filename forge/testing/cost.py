"""The cost of a plugin: the time of an update with and without it, on a task so small that it shows."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.testing.subject import Subject

UPDATES = 20
ROUNDS, ENOUGH_S = 3, 0.5
"""The number of rounds, and the seconds after which no further round begins."""


@dataclass(frozen=True, slots=True)
class PluginCost:
    """Microseconds per update: the medians of the fastest of a few fits."""

    alone_us: float
    with_us: float

    @property
    def own_us(self) -> float:
        """Return the microseconds that the plugin adds; 0 if that is within the noise."""
        return max(self.with_us - self.alone_us, 0.0)  # NaN stays NaN


def measure(subject: Subject) -> PluginCost:
    """Fit with and without the plugin in turn, so that a busy machine slows both."""
    alone, beside = [], []
    began = time.perf_counter()
    while len(alone) < ROUNDS and (not alone or time.perf_counter() - began < ENOUGH_S):
        alone.append(_update_us(subject))
        beside.append(_update_us(subject, subject.make()))
    return PluginCost(min(alone), min(beside))


def _update_us(subject: Subject, *plugins: Plugin) -> float:
    clock = Clock()
    subject.fit(*plugins, clock, max_updates=UPDATES, validate_every=None)
    times = [after - before for before, after in zip(clock.ended, clock.ended[1:], strict=False)]
    return statistics.median(times) / 1e3 if times else 0.0


class Clock(Plugin):
    """Records the end of each update, in nanoseconds."""

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self.name, self.ended = "forge.testing.clock", list[int]()

    @hookimpl
    def forge_boundary(self) -> None:
        self.ended.append(time.perf_counter_ns())
