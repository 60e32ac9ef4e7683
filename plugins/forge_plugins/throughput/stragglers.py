"""Stragglers: the time that each rank takes until it meets the others, exchanged once per log.

Ranks meet when gradients are exchanged, and some meet before: DDP copies rank 0's buffers at the beginning of forward,
where all wait for it. So two times are compared, until the step begins to compute and until its last gradient is there.
Where ranks meet inside of forward and backward, these times say nothing of a device. So, whatever the strategy is, each
rank also multiplies two matrices of its own at a log, where it waits for nobody, and those times are compared.
"""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import forge
from forge.env import Env
from forge.util.clock import Totals, duration

logger = logging.getLogger("forge")

SLOW = 0.1
"""Share of an update for which a rank holds up the median rank, from which it is a straggler."""
LASTING = 3
"""Logs in a row that must name the same rank."""
SLOWER, SHARE, KEPT = 1.5, 0.002, 8
"""How many times as long as the median rank's a slow device takes for a product; the share of the time that products
may take; and how many of them count."""
MOST = 16
"""Ranks up to which each has its own metric."""


SLOW_DEVICE = (
    "Look for other processes on its device or host (nvidia-smi, top), for lowered clocks "
    "(nvidia-smi -q -d PERFORMANCE), and for fewer threads (OMP_NUM_THREADS)."
)


@dataclass(frozen=True, slots=True)
class Pace:
    """One rank's average update in an interval, in seconds."""

    before: float
    "Until it begins to compute: waiting for data."
    own: float
    "Until its last gradient is there; as `before`, where it meets other ranks inside of forward and backward."
    update: float
    product: float = 0.0
    "For one product of matrices; 0 if that was not measured."


class Stragglers:
    """Finds the rank that the others wait for. All ranks see the same numbers, so all decide alike."""

    def __init__(self, env: Env):
        self._env = env
        self._lasting = [Lasting(), Lasting()]

    def exchange(
        self, done: Totals, known: Sequence[bool] = (), product: float = 0.0
    ) -> tuple[list[Pace] | None, list[bool]]:
        """Return the pace of every rank, None if one has nothing to tell; and what is `known` on any of them.

        One small reduction between hosts; all ranks must call."""
        own = done.before if done.own is None else done.own
        mine = [each / max(done.updates, 1) for each in (done.before, own, done.seconds)]
        numbers = [0] * (4 * self._env.world)
        numbers[4 * self._env.rank : 4 * self._env.rank + 4] = [round(each * 1e9) for each in (*mine, product)]
        count, numbers = len(numbers), self._env.all_max([*numbers, *map(int, known)])
        paces = [Pace(*(number / 1e9 for number in numbers[at : at + 4])) for at in range(0, count, 4)]
        return paces if all(pace.update for pace in paces) else None, [bool(number) for number in numbers[count:]]

    def judge(self, paces: list[Pace]) -> dict[str, float]:
        """Return the metrics; warn once about a rank that is slow at `LASTING` logs in a row."""
        times = max(([pace.before for pace in paces], [pace.own for pace in paces]), key=excess)
        slowest = times.index(max(times))
        share = excess(times) / max(pace.update for pace in paces)
        metrics: dict[str, float] = {"slowest_rank": slowest, "straggler_share": share}
        if len(paces) <= MOST:
            metrics |= {f"waited_ms_rank{rank}": 1e3 * (max(times) - own) for rank, own in enumerate(times)}
        self._tell(0, slowest if share >= SLOW else -1, lambda host: warning(paces, slowest, host, share))
        products = [pace.product for pace in paces]
        if all(products):
            slow, ratio = products.index(max(products)), max(products) / statistics.median_low(products)
            if len(paces) <= MOST:
                metrics |= {f"product_ms_rank{rank}": 1e3 * seconds for rank, seconds in enumerate(products)}
            is_slow = ratio >= SLOWER and not self._lasting[0].told
            self._tell(1, slow if is_slow else -1, lambda host: device_warning(products, slow, host))
        return metrics

    def _tell(self, kind: int, rank: int, text: Callable[[str], str]) -> None:
        if self._lasting[kind].is_new(rank):
            hosts = self._env.gather(socket.gethostname())
            if self._env.is_main:
                logger.warning("%s", text(hosts[rank]))


class Lasting:
    """Notices, once, that the same rank was named at `LASTING` logs in a row."""

    def __init__(self) -> None:
        self._rank, self._logs, self.told = -1, 0, False

    def is_new(self, rank: int) -> bool:
        self._rank, self._logs = rank, self._logs + 1 if rank == self._rank else 1
        is_new = rank >= 0 and self._logs == LASTING and not self.told
        self.told = self.told or is_new
        return is_new


class DeviceProduct:
    """The time of a product on this rank's device: the mean of the last ones, taken at logs for `SHARE` of the time."""

    def __init__(self, device: torch.device):
        self._on_host = device.type != "cuda"
        size = 256 if self._on_host else 2048
        self._given, self._product = (torch.full((size, size), 0.5, device=device) for _ in range(2))
        self._times: deque[float] = deque(maxlen=KEPT)
        self._events: tuple[Any, Any] | None = None
        self._last = -float("inf")

    def seconds(self) -> float:
        """Take the time of another product if one is due, and return the mean; 0 until some are known. On a device the
        time is read at a later log: nothing waits."""
        if self._events is not None and self._events[1].query():
            self._times.append(self._events[0].elapsed_time(self._events[1]) / 1e3)
            self._events = None
        if self._events is None and time.perf_counter() - self._last >= sum(list(self._times)[-1:]) / SHARE:
            self._last = time.perf_counter()
            self._take()
        return statistics.fmean(self._times) if len(self._times) >= LASTING else 0.0

    def _take(self) -> None:
        if self._on_host:
            self.multiply()
            self._times.append(time.perf_counter() - self._last)
            return
        self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._events[0].record()
        self.multiply()
        self._events[1].record()

    def multiply(self) -> None:
        torch.mm(self._given, self._given, out=self._product)


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
        look = f"It computes more slowly: {SLOW_DEVICE[0].lower()}{SLOW_DEVICE[1:]}"
    return (
        f"throughput: rank {slow} on {host} holds up the others for {share:.0%} of every update: it takes "
        f"{duration(times[slow])} until {until}, the median rank {duration(statistics.median_low(times))}. {look}"
    )


def device_warning(products: Sequence[float], slow: int, host: str) -> str:
    usual = statistics.median_low(products)
    return (
        f"throughput: the device of rank {slow} on {host} is {products[slow] / usual:.1f} times as slow as the median "
        f"rank's: a product of matrices takes it {duration(products[slow])} instead of {duration(usual)}, and the "
        f"others wait for it. {SLOW_DEVICE}"
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
