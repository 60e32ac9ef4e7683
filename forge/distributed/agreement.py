"""Agreement: requests of any rank become requests of all, and all ranks go by rank 0's clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from forge.contract.requests import KINDS

if TYPE_CHECKING:
    from forge.contract.run import Run
    from forge.contract.step import Step

AGREE_WITHIN = 2.0
"""Seconds between two agreements, about: a signal waits so long at most, beside the update under way."""


class Agreement:
    """When the ranks of a run agree, and on what. Rank 0 decides how many updates pass until the next agreement."""

    def __init__(self, run: Run):
        self._run = run
        self._next = 1
        self._last: tuple[int, float] | None = None

    def due(self, step: Step) -> bool:
        """Every log, every end of an epoch, and often enough in between that a signal is heard in time."""
        update = self._run.progress.update
        return step.ends_epoch or update % self._run.log_every == 0 or update >= self._next

    def reach(self, skip_next: set[int]) -> tuple[float, set[int]]:
        """Share the open requests; return rank 0's clock, and the windows that any rank wants to skip."""
        run, now = self._run, time.monotonic()
        env, requests, update = run.env, run.requests, run.progress.update
        spent = now - (self._last[1] if self._last else now)
        done = update - (self._last[0] if self._last else 0)
        gap = max(1, min(run.log_every, 2 * done, int(AGREE_WITHIN * done / spent) if spent else 1))
        self._last = (update, now)
        asked = [int(kind in requests.open) for kind in KINDS]
        *wanted, clock, gap = env.all_max([*asked, *((int(now * 1000), gap) if env.is_main else (0, 0))])
        self._next = update + gap
        if any(wanted):
            requests.agree(env.gather(requests.as_data()))
            skip_next = set().union(*env.gather(sorted(skip_next)))
        return clock / 1000, skip_next
