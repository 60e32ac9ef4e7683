"""Examine ranks: each multiplies, copies, and exchanges with its neighbours; what is wrong or slow is named.

Each result is compared with what it must be, so no rank is a standard for the others; times are compared with the
median rank's. The best of a few rounds counts, because a device may be waking up; and who seems slow is timed again,
because other work passes, and a slow device stays slow.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from forge.env import Env

ROUNDS, AGAIN = 5, 4
"""Rounds of each measure, and how often those are repeated in which a rank seems slow."""
WITHIN = 1e-2
"""A product in TF32 differs from that in float64 by about a thousandth."""
MEASURES = {
    "multiply": "multiplies",
    "copy": "copies between host and device",
    "exchange": "exchanges with its neighbour",
}
Work = tuple[Callable[[], None], Callable[[], bool]]
"""What is timed, and whether its result is right."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """What was found of one rank."""

    rank: int
    host: str
    device: str
    wrong: tuple[str, ...]
    "What it does wrong, as names of MEASURES."
    seconds: dict[str, float]
    "The best time of each measure."


@dataclass(frozen=True, slots=True)
class UnfitRank:
    """A rank that is not as it should be."""

    pulse: Pulse
    measure: str
    times: float
    "Its time beside the median rank's; 0 for a wrong result."

    @property
    def is_wrong(self) -> bool:
        return not self.times

    def __str__(self) -> str:
        how = "wrongly" if self.is_wrong else f"{self.times:.1f} times as slowly as the median rank"
        return f"rank {self.pulse.rank} on {self.pulse.host} ({self.pulse.device}) {MEASURES[self.measure]} {how}"


def examine(env: Env, slower: float) -> list[Pulse]:
    """Examine all ranks, together: every rank gets all pulses. `slower` is for `judge`."""
    on_host = env.device.type == "cpu"
    works = {
        "multiply": multiply(env, 512 if on_host else 4096),
        "copy": copy(env, 2**20 if on_host else 2**26),
        **({"exchange": exchange(env, 2**18 if on_host else 2**24)} if env.world > 1 else {}),
    }
    wrong, seconds = [], {}
    for name, work in works.items():
        seconds[name], is_right = _best(env, work)
        wrong += [] if is_right else [name]
    device = torch.cuda.get_device_name(env.device) if env.device.type == "cuda" else env.device.type
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    pulses = env.gather(Pulse(env.rank, host, device, tuple(wrong), seconds))
    for _ in range(AGAIN):
        late = {one.measure for one in judge(pulses, slower) if not one.is_wrong}
        if not late:
            break
        for name in sorted(late):  # every rank judges the same
            seconds[name] = min(seconds[name], _best(env, works[name])[0])
        pulses = env.gather(Pulse(env.rank, host, device, tuple(wrong), seconds))
    return pulses


def judge(pulses: Sequence[Pulse], slower: float) -> list[UnfitRank]:
    """Return who is wrong, and who takes over `slower` times as long as the median rank."""
    found = [UnfitRank(pulse, measure, 0.0) for pulse in pulses for measure in pulse.wrong]
    for measure in MEASURES:
        timed = [pulse for pulse in pulses if measure in pulse.seconds]
        usual = statistics.median_low([pulse.seconds[measure] for pulse in timed]) if timed else 0.0
        late = [(pulse, pulse.seconds[measure] / usual) for pulse in timed if usual]
        found += [UnfitRank(pulse, measure, times) for pulse, times in late if times > slower]
    return found


def _best(env: Env, work: Work) -> tuple[float, bool]:
    """Return the best time of a work, and whether its result was right in every round."""
    (do, is_right), times, right = work, [], True
    for _ in range(ROUNDS):
        env.all_max([0])  # nobody's wait for another counts
        env.synchronize()
        began = time.perf_counter()
        do()
        env.synchronize()
        times.append(time.perf_counter() - began)
        right = is_right() and right
    return min(times), right


def multiply(env: Env, size: int) -> Work:
    """Multiply two matrices; a few rows are compared with float64 on the host."""
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(size, size, generator=draw) for _ in range(2))
    here, there = one.to(env.device), other.to(env.device)
    product, rows = torch.empty_like(here), [0, size // 2, size - 1]
    expected = one[rows].double() @ other.double()

    def do() -> None:
        torch.mm(here, there, out=product)

    return do, lambda: _is_near(product[rows].cpu().double(), expected)


def copy(env: Env, numbers: int) -> Work:
    """Copy numbers to the device and back."""
    given = torch.arange(numbers, dtype=torch.int32)
    there, back = torch.empty_like(given, device=env.device), torch.empty_like(given)

    def do() -> None:
        there.copy_(given)
        back.copy_(there)

    return do, lambda: torch.equal(given, back)


def exchange(env: Env, numbers: int) -> Work:
    """Send numbers to the next rank, get those of the previous one, and add up those of all."""
    mine = torch.full((numbers,), float(env.rank + 1), device=env.device)
    got, total = torch.empty_like(mine), torch.empty_like(mine)
    after, before = (env.rank + 1) % env.world, (env.rank - 1) % env.world

    def do() -> None:
        calls = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, got, before)]
        for call in dist.batch_isend_irecv(calls):
            call.wait()
        dist.all_reduce(total.copy_(mine))

    def is_right() -> bool:
        expected = torch.full((numbers,), env.world * (env.world + 1) / 2)
        return bool((got == before + 1).all()) and _is_near(total.cpu(), expected)

    return do, is_right


def _is_near(found: Tensor, expected: Tensor) -> bool:
    error = (found - expected).abs().max()
    return bool(error <= WITHIN * expected.abs().max())
