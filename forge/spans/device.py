"""Times of a CUDA device, by events that are read later: nothing waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

MOST = 4096
"""Calls that wait to be read; of more, the oldest are dropped."""

Marks = tuple[Any, Any]
"""Two events between which the device works."""


class DeviceTimes:
    """What the device takes for calls, and for updates: from one `lap` to the next, without the pauses.

    So an update lasts from where the device began to wait for it, or still worked on the one before, to its end: the
    time of the slower of host and device.
    """

    make_event: Callable[[], Any] = staticmethod(partial(torch.cuda.Event, enable_timing=True))

    def __init__(self) -> None:
        self._started = False
        self._stream: Any = None
        self._free: list[Any] = []
        self._pending: deque[tuple[Any, Marks]] = deque(maxlen=MOST)
        self._since: Any = None
        "Where the latest part of this update began; None in a pause."
        self._parts: list[Marks] = []
        "Parts of this update, between its pauses."

    def start(self, stream: Any) -> None:
        """Time from here on."""
        self._started, self._stream = True, stream

    def begin(self) -> Any:
        """Return where a call begins; None before the start, and in a graph, whose events cannot be read."""
        return self._mark() if self._started and not torch.cuda.is_current_stream_capturing() else None

    def end(self, began: Any, total: Any) -> None:
        """Add the nanoseconds of a call to `total.device`, once they are known."""
        if began is not None:
            self._pending.append((total, (began, self._mark())))

    def forget(self) -> None:
        """Leave out the calls so far."""
        self._pending.clear()

    def collect(self) -> None:
        """Add the calls that the device has finished to their totals."""
        while self._pending and self.passed(self._pending[0][1]):
            total, marks = self._pending.popleft()
            total.device += int(1e9 * self.seconds([marks]))

    def pause(self) -> None:
        """What comes is no part of an update."""
        if self._since is not None:
            self._parts.append((self._since, self._mark()))
            self._since = None

    def go_on(self) -> None:
        self._since = self._mark() if self._started else None

    def lap(self) -> list[Marks]:
        """End an update, and begin the next one; return its parts."""
        self.pause()
        parts, self._parts = self._parts, []
        self.go_on()
        return parts

    def passed(self, marks: Marks) -> bool:
        """Whether the device has come to their end."""
        return marks[1].query()

    def seconds(self, parts: list[Marks]) -> float:
        """Return the seconds of parts that the device has passed; their events are used again."""
        found = sum(start.elapsed_time(end) for start, end in parts) / 1e3
        self._free += [event for marks in parts for event in marks]
        return found

    def _mark(self) -> Any:
        event = self._free.pop() if self._free else self.make_event()
        event.record(self._stream)
        return event
