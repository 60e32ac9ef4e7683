"""Agreement: share the requests of any rank with all ranks, and use rank 0's clock on all of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from forge.contract.requests import KINDS

if TYPE_CHECKING:
    from forge.contract.run import Run
    from forge.contract.step import Step

AGREE_WITHIN = 2.0
"""About how many seconds lie between two agreements: the longest that a signal waits after the current update."""


class Agreement:
    """When and on what the ranks of a run agree. Rank 0 decides how many updates pass until the next agreement."""

    def __init__(self, run: Run):
        self._run = run
        self._next = 1
        self._last: tuple[int, float] | None = None

    def due(self, step: Step) -> bool:
        """Whether to agree at this step: at every log and end of an epoch, and in time for a signal in between."""
        update = self._run.progress.update
        return step.ends_epoch or update % self._run.log_every == 0 or update >= self._next

    def reach(self, skip_next: set[int]) -> tuple[float, set[int]]:
        """Share the open requests; return rank 0's clock and the windows that any rank wants to skip."""
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
