"""What does a plugin cost? The time of an update with it, against one without; on a task so small that it shows."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.testing.subject import Subject

UPDATES = 20
ROUNDS, ENOUGH_S = 3, 0.5
"""As many rounds as this, unless so many seconds are over: slow updates need no second look."""


@dataclass(frozen=True, slots=True)
class PluginCost:
    """Microseconds per update, the medians of the quickest of a few fits each."""

    alone_us: float
    with_us: float

    @property
    def own_us(self) -> float:
        """What the plugin adds; what is within the noise of the clock may come out as 0."""
        return max(self.with_us - self.alone_us, 0.0)  # NaN stays NaN


def measure(subject: Subject) -> PluginCost:
    """Fits with and without the plugin in turn, so that a busy machine slows both."""
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
    """When each update ended, in nanoseconds."""

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self.name, self.ended = "forge.testing.clock", list[int]()

    @hookimpl
    def forge_boundary(self) -> None:
        self.ended.append(time.perf_counter_ns())
