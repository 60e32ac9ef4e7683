"""Measure the first batch with and without kernels, as a whole step, and keep only what makes it faster."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import forge
from forge.snapshot.sandbox import without_side_effects
from forge.util.patterns import listed

logger = logging.getLogger("forge")

LEAST_GAIN = 0.02
"""The least share of the step's time that kernels must save."""
ROUNDING = 1.005
"""Memory is the same up to this factor: allocators round."""
SMALLER, NO_SLOWER = 0.9, 0.005
"""Kernels are kept for a tenth less memory too, if they save this much time: surely no slower, within noise."""
WARM_UP, LEAST_ROUNDS, MOST_ROUNDS, SECONDS = 2, 5, 30, 1.0
"""Passes before the clock starts, rounds that are timed, and the time that they take in all."""

CHEAP, PATIENCE = 10.0, 120.0
"""Seconds for which kernels are tried one by one too, and if all together do not win: each may need a compilation."""

Kernels = frozenset[str]
AS_WRITTEN: Kernels = frozenset()


@dataclass(frozen=True, slots=True)
class StepCost:
    """What forward and backward of a batch cost."""

    ms: float
    peak: int = 0
    "The most bytes allocated on a CUDA device."
    why_not: str = ""
    "Why it could not be measured."

    def __str__(self) -> str:
        if self.why_not:
            return self.why_not
        return f"{self.ms:.4g} ms" + (f", {self.peak / 1e9:.4g} GB" if self.peak else "")


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The kernels that a step keeps, and what it costs with and without."""

    kept: tuple[str, ...] = ()
    costs: Mapping[Kernels, StepCost] | None = None

    def __str__(self) -> str:
        if not self.costs:
            return "the whole step was not measured"
        parts = []
        for names, cost in self.costs.items():
            end = " (used)" if names and names == frozenset(self.kept) else ""
            parts.append(f"{'with ' + listed(sorted(names)) if names else 'as written'} {cost}{end}")
        return "; ".join(parts)

    def as_data(self) -> dict[str, Any]:
        costs = [[sorted(names), cost.ms, cost.peak, cost.why_not] for names, cost in (self.costs or {}).items()]
        return {"kept": list(self.kept), "costs": costs}

    @classmethod
    def from_data(cls, data: Any) -> StepVerdict | None:
        """Return a verdict that was written down; None if it cannot be one."""
        try:
            costs = {frozenset(names): StepCost(ms, peak, why) for names, ms, peak, why in data["costs"]}
            return cls(tuple(data["kept"]), costs)
        except (TypeError, KeyError, ValueError):
            return None


Measure = Callable[[Sequence[Kernels]], Sequence[StepCost]]
"""Measures a step with each of these sets of kernels, in turns."""


def judge(
    names: Sequence[str], measure: Measure, memory: float = 1.0, clock: Callable[[], float] = time.monotonic
) -> StepVerdict:
    """Return the kernels with which the step is faster, and takes no more than `memory` times what it took; or is no
    slower, and takes a tenth less.

    All together are tried first, then each alone, then those that won alone together; of what wins the fastest is
    kept. Where that would take minutes, or seconds after all together have won, only all together are tried.
    """
    began = clock()
    costs: dict[Kernels, StepCost] = {}

    def wins(*candidates: Kernels) -> list[Kernels]:
        written, *others = measure([AS_WRITTEN, *candidates])
        costs.update({AS_WRITTEN: written, **dict(zip(candidates, others, strict=True))})
        pairs = zip(candidates, others, strict=True)
        return [names for names, cost in pairs if _wins(cost, written, memory)]

    every = frozenset(names)
    if not every:
        return StepVerdict()
    kept = wins(every)
    needed = (clock() - began) * len(every) / 2
    if len(every) > 1 and needed <= (CHEAP if kept else PATIENCE):
        alone = wins(*(frozenset([name]) for name in sorted(every)))
        if 1 < len(alone) < len(every):
            alone += wins(frozenset().union(*alone))
        kept += alone
    elif len(every) > 1 and not kept:
        logger.info(
            "kernels: %s were not tried one by one: that would take about %.0f s.", listed(sorted(every)), needed
        )
    best = min(kept, key=lambda names: costs[names].ms, default=AS_WRITTEN)
    return StepVerdict(tuple(sorted(best)), costs)


Context = Callable[[], AbstractContextManager[Any]]
"""Returns a new context to run a step in."""


def _wins(cost: StepCost, written: StepCost, memory: float) -> bool:
    faster = cost.ms <= (1 - LEAST_GAIN) * written.ms and cost.peak <= written.peak * max(memory, ROUNDING)
    return faster or (cost.ms <= (1 - NO_SLOWER) * written.ms and cost.peak < SMALLER * written.peak)


class StepTrial:
    """Forward and backward of a step's first batch, under any context, without side effects on the run."""

    def __init__(self, step: forge.Step):
        self._step, self._trainer = step, step.trainer
        self._device = step.trainer.env.device
        own = {id(parameter) for parameter in step.parameters()}
        self._wanted = [p for p in step.trainer.task.parameters() if id(p) in own and p.requires_grad]
        with without_side_effects(self._trainer):
            self._batch = self._trainer.hooks.forge_prepare_batch(step, step.window[0])

    def once(self) -> None:
        """Run forward and backward; gradients are dropped."""
        with torch.enable_grad():
            output = self._trainer.hooks.forge_forward(self._step, self._batch)
            loss = output if isinstance(output, Tensor) else output["loss"]
            torch.autograd.grad(loss, self._wanted, allow_unused=True)

    def measure(self, contexts: Sequence[Context]) -> list[StepCost]:
        """Time the step under each context, in turns. A context that fails is left out with its reason."""
        why_not = [self.fails(context) for context in contexts]
        works = [place for place, why in enumerate(why_not) if not why]
        peaks = {place: self._peak(contexts[place]) for place in works}
        seconds: dict[int, list[float]] = {place: [] for place in works}
        began = time.perf_counter()
        for turn in range(MOST_ROUNDS):
            if turn >= LEAST_ROUNDS and time.perf_counter() - began > SECONDS:
                break
            for place in works:
                seconds[place].append(self._seconds(contexts[place]))
        return [
            StepCost(math.inf, why_not=why) if why else StepCost(statistics.median(seconds[place]) * 1e3, peaks[place])
            for place, why in enumerate(why_not)
        ]

    def fails(self, context: Context) -> str:
        """Run the step under a context until it is compiled and tuned; return why that fails, or nothing."""
        try:
            for _ in range(WARM_UP):
                self._seconds(context)
        except Exception as error:
            logger.debug("kernels: a step under trial failed", exc_info=True)
            return f"it fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        return ""

    def _seconds(self, context: Context) -> float:
        with ExitStack() as stack:
            stack.enter_context(without_side_effects(self._trainer))
            stack.enter_context(context())
            self._wait()
            began = time.perf_counter()
            self.once()
            self._wait()
            return time.perf_counter() - began

    def _peak(self, context: Context) -> int:
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._seconds(context)
        return torch.cuda.max_memory_allocated(self._device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
