"""Times of steps, by the host's clock or by events on the device."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

clock = time.perf_counter
PAUSE = 1e-3
"""Gap in seconds between two steps that indicates other work: a log, a validation, a checkpoint."""
AT_ONCE = 256
"""Events that a long log interval may hold before finished ones are collected."""


@dataclass(slots=True)
class Done:
    """One update: from the beginning of its wait for data to the end of its step."""

    seconds: float
    waited: float
    samples: int
    items: Tensor | float
    flops: float | None
    before: float | None = None
    "Seconds until this rank began to compute, if that was noted."
    own: float | None = None
    "Seconds until its last gradient was there, if that was noted."


class Steps(Protocol):
    """Measures updates, one after the other."""

    def begin(self, waited: float) -> None:
        """Begin a step, after `waited` seconds for its data."""
        ...

    def computes(self) -> None:
        """Note that the step begins to compute."""
        ...

    def ready(self) -> None:
        """Note that gradients are there; the last call of a step counts."""
        ...

    def end(self, done: Done, counts: bool) -> None:
        """End a step; `done` has all but its seconds. A step that does not count is left out."""
        ...

    def take(self) -> list[Done]:
        """Return the updates known to be finished, each once, without waiting."""
        ...


class HostSteps:
    """Measures by the host's clock."""

    def __init__(self) -> None:
        self._began = 0.0
        self._computes: float | None = None
        self._ready: float | None = None
        self._done: list[Done] = []

    def begin(self, waited: float) -> None:
        self._began, self._computes, self._ready = clock() - waited, None, None

    def computes(self) -> None:
        self._computes = clock()

    def ready(self) -> None:
        self._ready = clock()

    def end(self, done: Done, counts: bool) -> None:
        if counts:
            done.seconds = clock() - self._began
            done.before = None if self._computes is None else self._computes - self._began
            done.own = None if self._ready is None else self._ready - self._began
            self._done.append(done)

    def take(self) -> list[Done]:
        done, self._done = self._done, []
        return done


class DeviceSteps:
    """Measures by events on the CUDA stream, which the host reads later.

    A step lasts from the end of the previous one to its own end: the time of the slower of host and device. After other
    work (a validation, a checkpoint), it begins where the device began it.
    """

    def __init__(self, make_event: Callable[[], Any], stream: Any = None) -> None:
        self._make_event, self._stream = make_event, stream
        self._start: Any = None
        self._marks: list[Any] = [None, None]
        "Events at which the step began to compute, and at which its gradients were there."
        self._before = 0.0
        self._ended = float("-inf")
        self._passed: deque[tuple[Any, list[Any], Any, float, Done | None]] = deque()
        self._done: list[Done] = []
        self._free: list[Any] = []

    def begin(self, waited: float) -> None:
        self._before = 0.0
        if clock() - waited - self._ended > PAUSE:
            self._start, self._before = self._event(), waited
            self._start.record(self._stream)

    def computes(self) -> None:
        self._mark(0)

    def ready(self) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        self._marks[which] = self._marks[which] or self._event()
        self._marks[which].record(self._stream)

    def end(self, done: Done, counts: bool) -> None:
        event = self._event()
        event.record(self._stream)
        self._passed.append((self._start, self._marks, event, self._before, done if counts else None))
        self._start, self._marks, self._ended = event, [None, None], clock()
        if len(self._passed) >= AT_ONCE:
            self._look()

    def take(self) -> list[Done]:
        self._look()
        done, self._done = self._done, []
        return done

    def _look(self) -> None:
        while self._passed and self._passed[0][2].query():
            start, marks, stop, before, done = self._passed.popleft()
            if done is not None:
                done.seconds = start.elapsed_time(stop) / 1e3 + before
                done.before, done.own = (
                    None if mark is None else start.elapsed_time(mark) / 1e3 + before for mark in marks
                )
                self._done.append(done)
            # the next step begins at `stop`, or has its own event
            self._free += [start, *(mark for mark in marks if mark is not None)]

    def _event(self) -> Any:
        return self._free.pop() if self._free else self._make_event()

    @classmethod
    def on(cls, device: torch.device) -> DeviceSteps:
        """Measure on a CUDA device."""
        return cls(partial(torch.cuda.Event, enable_timing=True), torch.cuda.current_stream(device))


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of some updates."""

    updates: int
    seconds: float
    waited: float
    samples: int
    items: Tensor | float
    counted: float
    "Seconds of the updates with known FLOPs."
    flops: float
    times: list[float]
    "Seconds of each update, sorted."
    before: float = 0.0
    "Seconds until updates began to compute."
    own: float | None = None
    "Seconds until their gradients were there; None unless all of them told."

    @classmethod
    def of(cls, done: list[Done]) -> Summary:
        known = [one for one in done if one.flops is not None]
        return cls(
            len(done),
            sum(one.seconds for one in done),
            sum(one.waited for one in done),
            sum(one.samples for one in done),
            sum((one.items for one in done), start=0.0),
            sum(one.seconds for one in known),
            sum(one.flops or 0.0 for one in known),
            sorted(one.seconds for one in done),
            sum(one.before or 0.0 for one in done),
            None if any(one.own is None for one in done) else sum(one.own or 0.0 for one in done),
        )

    def plus(self, other: Summary) -> Summary:
        """Return the sum; the times of single updates are kept elsewhere."""
        return Summary(
            self.updates + other.updates,
            self.seconds + other.seconds,
            self.waited + other.waited,
            self.samples + other.samples,
            self.items + other.items,
            self.counted + other.counted,
            self.flops + other.flops,
            [],
        )

    def rate(self, amount: Any) -> Any:
        return amount / self.seconds if self.seconds else 0.0

    @property
    def flops_per_second(self) -> float | None:
        return self.flops / self.counted if self.counted else None

    @property
    def wait_share(self) -> float:
        return self.waited / self.seconds if self.seconds else 0.0


def percentile(times: list[float], share: float) -> float:
    """Return the time of sorted `times` that a share of them does not exceed."""
    return times[max(0, math.ceil(share * len(times)) - 1)]
