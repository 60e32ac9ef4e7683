"""StallClock: how long a run has made no progress."""

from __future__ import annotations

import time

from forge.contract.run import Run


class StallClock:
    """Measure how long a run has made no progress, and whether it has made any."""

    def __init__(self) -> None:
        self.begun = False
        "Whether an update of this run, or a batch of its evaluation, is done."
        self._last: tuple[int, ...] = ()
        self._since = time.monotonic()

    def restart(self) -> None:
        self._since = time.monotonic()

    def still_for(self, trainer: Run | None) -> float:
        """Return the seconds since update, micro-batch and evaluated batches last changed."""
        if trainer is not None:
            update, step = trainer.progress.update, trainer.step
            trained = step is not None and update != (trainer.resumed_from or 0)
            self.begun = self.begun or trained or trainer.evaluated > 0
            now = (update, step.micro if step is not None else -1, trainer.evaluated)
            if now != self._last:
                self._last = now
                self.restart()
        return time.monotonic() - self._since
