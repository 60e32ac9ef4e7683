"""StallWatch: say once where a single process is that does not come back from its own step or loader.

Several ranks have heartbeats, which end such a run; one process alone would be silent for ever.
"""

from __future__ import annotations

import logging
import threading

from forge.contract.run import Run
from forge.runs.stall_clock import StallClock
from forge.runs.wording import duration
from forge.util.stacks import main_stack

logger = logging.getLogger("forge")

FAR = 10
"""How many times the longest wait so far counts as far more."""
CURE = (
    "Look at the last line of yours: a loop without an end, a lock or queue that nobody serves, a file or host that "
    "does not answer. Ctrl-C ends the run."
)


class StallWatch:
    """A thread that reads the counters of a run, and never stops or changes it."""

    def __init__(self, trainer: Run, limit: float):
        self.trainer, self.limit = trainer, limit
        self._clock, self._longest, self._last = StallClock(), 0.0, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-stall-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self.limit / 10)):
            still = self._clock.still_for(self.trainer)
            self._longest = max(self._longest, self._last) if still < self._last else self._longest
            self._last = still
            if still >= max(self.limit, FAR * self._longest):
                logger.warning("%s", self._told(still))
                return

    def _told(self, still: float) -> str:
        head = (
            f"Nothing has moved for {duration(still)}; before, no update or batch took longer than "
            f"{duration(self._longest)}."
            if self._clock.begun
            else f"Still in the first step after {duration(still)}. A compiler or a cache may take as long."
        )
        lines = "\n".join(f"  {line}" for line in main_stack())
        return f"{head} The main thread is here, innermost call last:\n{lines}\n{CURE}"
