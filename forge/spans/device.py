"""Times of a CUDA device, by events that are read later: nothing waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

MOST = 4096
"""Pairs of events that wait to be read; of more, the oldest are dropped."""


class DeviceTimes:
    """Adds what the device takes for calls to their totals, in nanoseconds, once it has finished them."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._free: list[Any] = []
        self._pending: deque[tuple[Any, Any, Any]] = deque(maxlen=MOST)

    def start(self, device: torch.device) -> None:
        """Time calls from here on."""
        self._stream = torch.cuda.current_stream(device)

    def timed(self, function: Callable[..., Any], total: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self._stream is None or torch.cuda.is_current_stream_capturing():  # an event of a graph cannot be read
                return function(*args)
            start = self._mark()
            try:
                return function(*args)
            finally:
                self._pending.append((total, start, self._mark()))

        return call

    def _mark(self) -> Any:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def collect(self) -> None:
        """Read the events that the device has passed."""
        while self._pending and self._pending[0][2].query():
            total, start, end = self._pending.popleft()
            total.device += int(start.elapsed_time(end) * 1e6)
            self._free += [start, end]
