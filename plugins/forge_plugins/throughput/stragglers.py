"""Stragglers: the time that each rank takes until it meets the others, exchanged once per log.

Ranks meet when gradients are exchanged, and some meet before: DDP copies rank 0's buffers at the beginning of forward,
where all wait for it. So two times are compared, until the step begins to compute and until its last gradient is there.
"""

from __future__ import annotations

import logging
import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import forge
from forge.env import Env
from forge_plugins.common.clock import Totals, duration

logger = logging.getLogger("forge")

SLOW = 0.1
"""Share of an update for which a rank holds up the median rank, from which it is a straggler."""
LASTING = 3
"""Logs in a row that must name the same rank."""
MOST = 16
"""Ranks up to which each has its own metric."""


@dataclass(frozen=True, slots=True)
class Pace:
    """One rank's average update in an interval, in seconds."""

    before: float
    "Until it begins to compute: waiting for data."
    own: float
    "Until its last gradient is there; as `before`, where it meets other ranks inside of forward and backward."
    update: float


class Stragglers:
    """Finds the rank that the others wait for. All ranks see the same numbers, so all decide alike."""

    def __init__(self, env: Env):
        self._env = env
        self._rank, self._logs, self._warned = -1, 0, False

    def exchange(self, done: Totals, known: Sequence[bool] = ()) -> tuple[list[Pace] | None, list[bool]]:
        """Return the pace of every rank, None if one has nothing to tell; and what is `known` on any of them.

        One small reduction between hosts; all ranks must call."""
        own = done.before if done.own is None else done.own
        mine = [round(each / max(done.updates, 1) * 1e9) for each in (done.before, own, done.seconds)]
        numbers = [0] * (3 * self._env.world)
        numbers[3 * self._env.rank : 3 * self._env.rank + 3] = mine
        count, numbers = len(numbers), self._env.all_max([*numbers, *map(int, known)])
        paces = [Pace(*(number / 1e9 for number in numbers[at : at + 3])) for at in range(0, count, 3)]
        return paces if all(pace.update for pace in paces) else None, [bool(number) for number in numbers[count:]]

    def judge(self, paces: list[Pace]) -> dict[str, float]:
        """Return the metrics; warn once about a rank that is slow at `LASTING` logs in a row."""
        times = max(([pace.before for pace in paces], [pace.own for pace in paces]), key=excess)
        slowest = times.index(max(times))
        share = excess(times) / max(pace.update for pace in paces)
        metrics: dict[str, float] = {"slowest_rank": slowest, "straggler_share": share}
        if len(paces) <= MOST:
            metrics |= {f"waited_ms_rank{rank}": 1e3 * (max(times) - own) for rank, own in enumerate(times)}
        slow = slowest if share >= SLOW else -1
        self._rank, self._logs = slow, self._logs + 1 if slow == self._rank else 1
        if slow >= 0 and self._logs == LASTING and not self._warned:
            self._warned = True
            hosts = self._env.gather(socket.gethostname())
            if self._env.is_main:
                logger.warning("%s", warning(paces, slow, hosts[slow], share))
        return metrics


def excess(times: Sequence[float]) -> float:
    """Return how much longer the slowest rank takes than the median one."""
    return max(times) - statistics.median_low(times)


def warning(paces: Sequence[Pace], slow: int, host: str, share: float) -> str:
    """Return the text about a straggler: who, how much, and what to look at."""
    before, own = [pace.before for pace in paces], [pace.own for pace in paces]
    waits = excess(before) > excess(own) / 2
    times, until = (before, "it has its data") if waits else (own, "its gradients are there")
    if waits:
        look = "It waits for data: look at its disk or network storage, and at the workers of its loader."
    else:
        look = (
            "It computes more slowly: look for other processes on its device or host (nvidia-smi, top), for lowered "
            "clocks (nvidia-smi -q -d PERFORMANCE), and for fewer threads (OMP_NUM_THREADS)."
        )
    return (
        f"throughput: rank {slow} on {host} holds up the others for {share:.0%} of every update: it takes "
        f"{duration(times[slow])} until {until}, the median rank {duration(statistics.median_low(times))}. {look}"
    )


def meets_once(trainer: forge.Run) -> bool:
    """Whether ranks meet only to exchange gradients: sharded models and pipelines meet in every block."""
    whole = trainer.env.parts is None and len(trainer.optimizers) == 1
    return whole and not any(isinstance(parameter, DTensor) for parameter in trainer.task.parameters())


class LastGradient:
    """Calls `ready` whenever the last gradient of a backward pass is there: a strategy waits for other ranks after
    that. Which parameter is the last one is learned in one update, with a hook on each."""

    def __init__(self, parameters: Sequence[nn.Parameter], ready: Callable[[], None]):
        self._parameters, self._ready = parameters, ready
        self._last: nn.Parameter | None = None
        self._hooks: list[Any] = []

    def learn(self) -> None:
        """Find the last parameter in the next update."""
        self.remove()
        self._last = None
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in self._parameters if p.requires_grad]

    def settle(self) -> None:
        """Keep the hook of the last parameter only; does nothing until a backward pass has shown it."""
        if len(self._hooks) > 1 and self._last is not None:
            self.remove()
            self._hooks = [self._last.register_post_accumulate_grad_hook(self._note)]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note(self, parameter: torch.Tensor) -> None:
        self._last = parameter  # pyright: ignore[reportAttributeAccessIssue]
        if not (parameter.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._ready()
