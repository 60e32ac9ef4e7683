"""Time a function on a device, forward and backward, and compare with the device's ceilings.

Times come from device events: the host queues all work of a pass while the device sleeps, so that kernels are measured
and not Python. Caches are cold before every pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_kernels.contract import Cost, leaves
from forge_kernels.torch_internals import sleep_on_device

Work = Callable[[], Any]

FLUSHED = 256 * 2**20
"""Bytes written between two passes: more than any cache holds."""
CYCLES = 2_000_000
"""Approximate device cycles per millisecond; sleeps are given in cycles."""
LONGEST_SLEEP = 20.0
"""Milliseconds."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Duration of one pass in seconds."""

    median: float
    low: float
    "A fifth of the passes were faster than this."
    high: float
    "A fifth of the passes were slower than this."

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        ranked = sorted(seconds)
        fifth = len(ranked) // 5
        return cls(statistics.median(ranked), ranked[fifth], ranked[-1 - fifth])


class Stopwatch:
    """Times functions on one device in turns, so that a drift of the device affects all of them.

    `quick` is for a choice before training, not for published figures.
    """

    def __init__(self, device: torch.device, quick: bool = False):
        self.device = device
        self.warm_up, self.least, self.most, self.seconds = (2, 7, 15, 0.1) if quick else (5, 20, 100, 1.0)
        self._flushed = torch.empty(FLUSHED if device.type == "cuda" else 1, dtype=torch.uint8, device=device)

    def __call__(self, *works: Work) -> list[Timing]:
        """Return the timing of each function."""
        naps = [self._warm_up(work) for work in works]
        seconds: list[list[float]] = [[self._pass(work, nap)] for work, nap in zip(works, naps, strict=True)]
        longest = max(taken[0] for taken in seconds)
        repeats = max(self.least, min(self.most, int(self.seconds / max(longest, 1e-6))))
        for _ in range(repeats - 1):
            for work, nap, taken in zip(works, naps, seconds, strict=True):
                taken.append(self._pass(work, nap))
        return [Timing.of(taken) for taken in seconds]

    def _warm_up(self, work: Work) -> float:
        """Run until compiled and tuned; return how long to sleep, in milliseconds, while the host queues a pass."""
        for _ in range(self.warm_up):
            work()
        self._wait()
        began = time.perf_counter()
        work()
        nap = (time.perf_counter() - began) * 1e3
        self._wait()
        return min(1.5 * nap + 0.05, LONGEST_SLEEP)

    def _pass(self, work: Work, nap: float) -> float:
        self._flushed.zero_()
        if self.device.type != "cuda":
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sleep_on_device(int(nap * CYCLES))
        before.record()
        work()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# ---------------------------------------------------------------------------------------------------------------------
# One pass


class Pass:
    """A function on arguments, forward, and backward for all inputs that require a gradient."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any] | None = None):
        self.function, self.args, self.options = function, args, options or {}
        self.wanted = [leaf for leaf in leaves([args, self.options]) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.given: list[Tensor] | None = None
        "The gradients of the outputs, drawn in the first pass unless set before."

    def __call__(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return outputs, and gradients in the order of `wanted`."""
        output = self.function(*self.args, **self.options)
        outputs = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
        behind = [leaf for leaf in outputs if leaf.requires_grad]
        if not self.wanted or not behind:
            return outputs, []
        if self.given is None:
            self.given = [_gradient(leaf) for leaf in behind]
        with torch.autocast(behind[0].device.type, enabled=False):  # it is for the forward only
            return outputs, list(torch.autograd.grad(behind, self.wanted, self.given, allow_unused=True))

    def results(self) -> list[Tensor | None]:
        """Return outputs and gradients of one pass in one list, detached."""
        outputs, gradients = self()
        return [*(leaf.detach() for leaf in outputs), *gradients]


def _gradient(output: Tensor) -> Tensor:
    """Return a gradient of an output: the same values for the same shape, for every dtype and device.

    A scalar gets 1, as from `loss.backward()`: a kernel may have computed its gradient, and another factor would cost
    it a pass.
    """
    if output.dim() == 0:
        return torch.ones_like(output)
    generator = torch.Generator().manual_seed(7)
    if output.numel() > 2**24:  # drawing on the host would be slow
        generator = torch.Generator(output.device).manual_seed(7)
    drawn = torch.randn(output.shape, generator=generator, device=generator.device, dtype=torch.float32)
    return drawn.to(output.device, output.dtype)


def distance(result: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm of the exact values; infinite if either has a NaN."""
    if result.shape != exact.shape:
        return float("inf")
    wide = torch.promote_types(result.dtype, exact.dtype)
    if not wide.is_floating_point:
        return 0.0 if torch.equal(result, exact) else float("inf")
    kind = torch.float64 if wide == torch.float64 else torch.float32
    norm = float(torch.linalg.vector_norm(exact, dtype=kind))
    off = float(torch.linalg.vector_norm(result.to(wide) - exact.to(wide), dtype=kind))
    return off / max(norm, torch.finfo(kind).tiny) if off == off and norm < float("inf") else float("inf")


# ---------------------------------------------------------------------------------------------------------------------
# Ceilings of the device


@dataclass(frozen=True, slots=True)
class Ceilings:
    """A device's measured maximum: bytes moved and operations done per second."""

    bytes: float
    flops: float

    def share(self, cost: Cost, seconds: float) -> float:
        """Return the share of the roofline that a time reaches; 1 is the fastest possible."""
        return max(cost.bytes / self.bytes, cost.flops / self.flops) / seconds


def measure_ceilings(stopwatch: Stopwatch) -> Ceilings:
    """Measure a large copy, which reads and writes each byte once, and a large bfloat16 product of random numbers."""
    device = stopwatch.device
    count, side = (2**30, 8192) if device.type == "cuda" else (2**20, 64)
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    copied, multiplied = stopwatch(lambda: target.copy_(source), lambda: a @ b)
    return Ceilings(2 * count / copied.median, 2 * side**3 / multiplied.median)
