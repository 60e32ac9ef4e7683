"""Deadline: how much time an examination has left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Deadline:
    """A point in time; with None it never comes. `clock` is the wall's, or `time.process_time` for that of the CPU."""

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.perf_counter):
        self.seconds, self.clock = math.inf if seconds is None else seconds, clock
        self._began = clock()

    @property
    def spent(self) -> float:
        return self.clock() - self._began

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    @property
    def is_over(self) -> bool:
        return self.left <= 0

    def part(self, share: float) -> Deadline:
        """Return a deadline for this share of what is left."""
        return Deadline(max(0.0, share * self.left), self.clock)
