"""One clock for what times updates: marks of a step, on the host or on the device, and sums over steps."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

clock = time.perf_counter
PAUSE = 1e-3
"""Gap in seconds between two steps that indicates other work: a log, a validation, a checkpoint."""
AT_ONCE = 256
"""Steps that a long log interval may hold before finished ones are collected."""


@dataclass(slots=True)
class TimedStep:
    """One update: from the beginning of its wait for data to the end of its step."""

    waited: float
    samples: int
    items: Tensor | float = 0.0
    flops: float | None = None
    seconds: float = 0.0
    before: float | None = None
    "Seconds until this rank began to compute, if that was marked."
    own: float | None = None
    "Seconds until its last gradient was there, if that was marked."


class StepClock:
    """Times updates, one after the other, by the host's clock.

    On a device the marks are events, which the host reads later: nothing waits. There a step lasts from the end of the
    previous one to its own end, the time of the slower of host and device; after other work (a validation, a
    checkpoint) it begins where the device began it.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None, stream: Any = None):
        self._make_event, self._stream = make_event, stream
        self._start: Any = None
        self._marks: list[Any] = [None, None]
        "Where the step began to compute, and where its gradients were there."
        self._before, self._ended = 0.0, -math.inf
        self._passed: deque[tuple[Any, list[Any], Any, float, TimedStep | None]] = deque()
        self._done: list[TimedStep] = []
        self._free: list[Any] = []

    @classmethod
    def on(cls, device: torch.device) -> StepClock:
        """Return the clock for a device."""
        if device.type != "cuda":
            return cls()
        return cls(partial(torch.cuda.Event, enable_timing=True), torch.cuda.current_stream(device))

    def begin(self, waited: float) -> None:
        """Begin a step, after `waited` seconds for its data."""
        self._before = 0.0
        if self._make_event is None or clock() - waited - self._ended > PAUSE:
            self._start, self._before = self._mark(), waited

    def computes(self) -> None:
        """Note that the step begins to compute."""
        self._marks[0] = self._mark(self._marks[0])

    def ready(self) -> None:
        """Note that gradients are there; the last call of a step counts."""
        self._marks[1] = self._mark(self._marks[1])

    def end(self, step: TimedStep, counts: bool) -> None:
        """End a step, whose times are filled in later. One that does not count is left out."""
        stop = self._mark()
        self._passed.append((self._start, self._marks, stop, self._before, step if counts else None))
        self._start, self._marks, self._ended = stop, [None, None], clock()
        if len(self._passed) >= AT_ONCE:
            self._collect()

    def take(self) -> list[TimedStep]:
        """Return the updates known to be finished, each once, without waiting."""
        self._collect()
        done, self._done = self._done, []
        return done

    def _mark(self, event: Any = None) -> Any:
        if self._make_event is None:
            return clock()
        event = event or (self._free.pop() if self._free else self._make_event())
        event.record(self._stream)
        return event

    def _collect(self) -> None:
        while self._passed and (self._make_event is None or self._passed[0][2].query()):
            start, marks, stop, before, step = self._passed.popleft()
            if step is not None:
                step.seconds = self._between(start, stop) + before
                step.before, step.own = (m if m is None else self._between(start, m) + before for m in marks)
                self._done.append(step)
            if self._make_event is not None:  # the next step begins at `stop`, or has its own event
                self._free += [start, *(mark for mark in marks if mark is not None)]

    def _between(self, start: Any, stop: Any) -> float:
        return stop - start if self._make_event is None else start.elapsed_time(stop) / 1e3


@dataclass(slots=True)
class Totals:
    """Sums over updates."""

    updates: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    samples: int = 0
    items: Tensor | float = 0.0
    counted: float = 0.0
    "Seconds of the updates with known FLOPs."
    flops: float = 0.0
    before: float = 0.0
    "Seconds until updates began to compute."
    own: float | None = 0.0
    "Seconds until their gradients were there; None unless all of them told."
    times: list[float] | deque[float] = field(default_factory=list)
    "Seconds of each update, or of the latest."

    @classmethod
    def of(cls, steps: Iterable[TimedStep]) -> Totals:
        total = cls()
        for step in steps:
            total.add(step)
        return total

    def add(self, step: TimedStep) -> None:
        self.updates += 1
        self.seconds += step.seconds
        self.waited += step.waited
        self.samples += step.samples
        self.items = self.items + step.items  # a tensor is not read, nor written to
        if step.flops is not None:
            self.counted, self.flops = self.counted + step.seconds, self.flops + step.flops
        self.before += step.before or 0.0
        self.own = None if self.own is None or step.own is None else self.own + step.own
        self.times.append(step.seconds)

    def rate(self, amount: Any) -> Any:
        return amount / self.seconds if self.seconds else 0.0

    @property
    def flops_per_second(self) -> float | None:
        return self.flops / self.counted if self.counted else None


def duration(seconds: float) -> str:
    """ "12 µs", "3.42 ms", "1.2 s", "14,000 s"."""
    unit, scale = next((each for each in (("s", 1.0), ("ms", 1e-3)) if seconds >= 0.9995 * each[1]), ("µs", 1e-6))
    return f"{seconds:,.0f} s" if seconds >= 999.5 else f"{seconds / scale:.3g} {unit}"


def percentile(times: Iterable[float], share: float) -> float:
    """Return the time that a share of the `times` does not exceed."""
    ordered = sorted(times)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
