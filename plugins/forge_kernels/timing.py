"""Measuring: how long a function takes on a device, forward and backward, and how near that is to what it can do.

Times are the device's own, by its events: the host hands over all work of a pass while the device is still asleep, so
that what is measured are kernels and not Python. Caches are cold before every pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from forge_kernels.contract import Cost

Work = Callable[[], Any]

FLUSHED = 256 * 2**20
"""Bytes that are written between two passes: more than any cache holds."""
CYCLES = 2_000_000
"""What a device sleeps is given in cycles: about so many of them make a millisecond."""
LONGEST_SLEEP = 20.0
"""Milliseconds."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that one pass takes."""

    median: float
    low: float
    "A fifth of the passes were faster than this."
    high: float
    "A fifth of them were slower."

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        ranked = sorted(seconds)
        fifth = len(ranked) // 5
        return cls(statistics.median(ranked), ranked[fifth], ranked[-1 - fifth])


class Stopwatch:
    """Times functions on one device, turn by turn, so that what changes meanwhile meets all of them.

    `quick` is for a decision before training, not for a table.
    """

    def __init__(self, device: torch.device, quick: bool = False):
        self.device = device
        self.warm_up, self.least, self.most, self.seconds = (2, 7, 15, 0.1) if quick else (5, 20, 100, 1.0)
        self._flushed = torch.empty(FLUSHED if device.type == "cuda" else 1, dtype=torch.uint8, device=device)

    def __call__(self, *works: Work) -> list[Timing]:
        """The time of each."""
        naps = [self._warm_up(work) for work in works]
        seconds: list[list[float]] = [[self._pass(work, nap)] for work, nap in zip(works, naps, strict=True)]
        longest = max(taken[0] for taken in seconds)
        repeats = max(self.least, min(self.most, int(self.seconds / max(longest, 1e-6))))
        for _ in range(repeats - 1):
            for work, nap, taken in zip(works, naps, seconds, strict=True):
                taken.append(self._pass(work, nap))
        return [Timing.of(taken) for taken in seconds]

    def _warm_up(self, work: Work) -> float:
        """Run it until it is compiled and tuned; milliseconds that the host needs to hand it over."""
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
        torch.cuda._sleep(int(nap * CYCLES))
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
    """A function on arguments, forward and backward: gradients for all inputs that require one, where any does."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        options: Mapping[str, Any] | None = None,
        also: Sequence[Tensor] = (),
    ):
        self.function, self.args, self.options = function, args, options or {}
        self.inputs = [leaf for leaf in tree_leaves([list(args), dict(self.options)]) if isinstance(leaf, Tensor)]
        self.wanted = [leaf for leaf in [*self.inputs, *also] if leaf.requires_grad]
        self.given: list[Tensor] | None = None
        "The gradients of the outputs, drawn in the first pass unless they are set before."

    def __call__(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Outputs, and gradients in the order of `wanted`."""
        output = self.function(*self.args, **self.options)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        behind = [leaf for leaf in outputs if leaf.requires_grad]
        if not self.wanted or not behind:
            return outputs, []
        if self.given is None:
            self.given = [_gradient(leaf) for leaf in behind]
        return outputs, list(torch.autograd.grad(behind, self.wanted, self.given, allow_unused=True))

    def results(self) -> list[Tensor | None]:
        """Outputs and gradients of one pass, in one list and without their graph."""
        outputs, gradients = self()
        return [*(leaf.detach() for leaf in outputs), *gradients]


def _gradient(output: Tensor) -> Tensor:
    """Something to go backward with: the same numbers for the same shape, whatever the dtype and the device.

    A loss gets the 1 of `loss.backward()`: a kernel may have its gradient ready, and a factor would cost it a pass.
    """
    if output.dim() == 0:
        return torch.ones_like(output)
    generator = torch.Generator().manual_seed(7)
    if output.numel() > 2**24:  # the host would take long to draw them
        generator = torch.Generator(output.device).manual_seed(7)
    drawn = torch.randn(output.shape, generator=generator, device=generator.device, dtype=torch.float32)
    return drawn.to(output.device, output.dtype)


def distance(result: Tensor, exact: Tensor) -> float:
    """Norm of the difference over norm of the exact values; infinite where one of the two has what is no number."""
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
# What the device can do


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device reaches at best: bytes moved and operations done, each in a second."""

    bytes: float
    flops: float

    def share(self, cost: Cost, seconds: float) -> float:
        """How much of the roofline a time reaches: 1 is a kernel that nobody can make faster."""
        return max(cost.bytes / self.bytes, cost.flops / self.flops) / seconds


def measure_ceilings(stopwatch: Stopwatch) -> Ceilings:
    """A large copy, which reads and writes each byte once, and a large product in bfloat16, of random numbers."""
    device = stopwatch.device
    count, side = (2**30, 8192) if device.type == "cuda" else (2**20, 64)
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    copied, multiplied = stopwatch(lambda: target.copy_(source), lambda: a @ b)
    return Ceilings(2 * count / copied.median, 2 * side**3 / multiplied.median)
