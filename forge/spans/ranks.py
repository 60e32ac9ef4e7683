"""The rank that the others wait for, found by the spans of each rank's own work.

Ranks meet where gradients are exchanged, in the backward pass, so its time is not one rank's own. What comes before is
(where ranks meet inside of forward too, as in sharded models, that is hidden as well), and so is the optimizer's step.
"""

from __future__ import annotations

import logging
import socket
import statistics
from collections.abc import Mapping, Sequence

from forge.env import Env
from forge.util.text import duration

logger = logging.getLogger("forge")

OWN = ("data", "to_device", "forward", "optimizer")
"""Phases in which a rank waits for no other."""
SLOW, LASTING = 0.1, 3
"""Share of an update for which a slow rank holds up the median rank, at least; logs in a row that must say so."""
MOST = 16
"""Ranks up to which each has its own metric."""


class SlowRanks:
    """Compares ranks at every log. All see the same numbers, so all decide alike."""

    def __init__(self, env: Env):
        self._env = env
        self.own: Sequence[float] = ()
        "Seconds of each rank's own work in an update, at the latest log."
        self._named, self._logs, self._told = -1, 0, False

    def compare(self, phases: Mapping[str, float], update: float) -> dict[str, float]:
        """Return the metrics, from this rank's average update; one small reduction between hosts."""
        world, rank = self._env.world, self._env.rank
        mine = [*(round(phases[name] * 1e9) for name in OWN), round(update * 1e9)]
        numbers = [0] * (len(mine) * world)
        numbers[rank * len(mine) : (rank + 1) * len(mine)] = mine
        numbers = self._env.all_max(numbers)
        every = [[ns / 1e9 for ns in numbers[at : at + len(mine)]] for at in range(0, len(numbers), len(mine))]
        self.own = [sum(times[:-1]) for times in every]
        slowest = self.own.index(max(self.own))
        excess = self.own[slowest] - statistics.median_low(self.own)
        share = excess / max(times[-1] for times in every)
        self._tell(slowest if share >= SLOW else -1, share, every)
        waits = {f"waited_ms_rank{r}": 1e3 * (max(self.own) - own) for r, own in enumerate(self.own) if world <= MOST}
        return {"slowest_rank": slowest, "straggler_share": share, **waits}

    def _tell(self, rank: int, share: float, every: Sequence[Sequence[float]]) -> None:
        """Name a rank with its host, once, when it was slow at several logs in a row."""
        self._logs = self._logs + 1 if rank == self._named else 1
        self._named = rank
        if rank < 0 or self._logs < LASTING or self._told:
            return
        self._told = True
        host = self._env.gather(socket.gethostname())[rank]
        usual = [statistics.median_low(times) for times in zip(*every, strict=True)]
        phase = max(range(len(OWN)), key=lambda i: every[rank][i] - usual[i])
        look = "processes on its device or host, lowered clocks and fewer threads (nvidia-smi, top, OMP_NUM_THREADS)"
        if self._env.is_main:
            text = "spans: rank %d on %s holds up the others for %.0f%% of every update: %s takes it %s, the median "
            text += "rank %s. Look there at %s."
            logger.warning(
                text,
                rank,
                host,
                100 * share,
                OWN[phase],
                duration(every[rank][phase]),
                duration(usual[phase]),
                "the disk or network storage, and the workers of its loader" if OWN[phase] == "data" else look,
            )
