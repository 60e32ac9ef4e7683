"""Compare one batch eager and compiled, and find the first module that differs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import forge
from forge import torch_internals as internals
from forge.diagnose.checks import check_training_output
from forge.snapshot.sandbox import without_side_effects
from forge_plugins.compile.regions import Region, Regions
from forge_plugins.compile.search import CompiledDifference, ForwardRecorder, Search, furthest, tolerance_for

PASSES = 5
"""Timed passes, compiled and eager."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing one batch."""

    worst: CompiledDifference
    tolerance: float
    dtype: torch.dtype
    culprit: str | None = None
    "The first module that differs, with its own difference, if the worst is too large."
    ms: tuple[float, float] | None = None
    "Forward and backward of the batch in milliseconds, compiled and eager."

    @property
    def agrees(self) -> bool:
        return self.worst.relative <= self.tolerance

    def __str__(self) -> str:
        if self.ms is not None:
            took = f" Forward and backward take {self.ms[0]:.3g} ms compiled, {self.ms[1]:.3g} ms eager."
            return f"{replace(self, ms=None)}{took}"
        allowed = f"{self.tolerance:g} is allowed for {str(self.dtype).removeprefix('torch.')}"
        if self.worst.absolute == 0:
            return "compiled and eager agree on the first batch bit for bit."
        if self.agrees:
            return f"compiled and eager agree on the first batch: they differ by up to {self.worst}; {allowed}."
        culprit = self.culprit or (
            "No module differs when it is compiled by itself: the difference comes from the step around them, or from "
            "compiling them together."
        )
        return f"compiled and eager disagree on the first batch: they differ by {self.worst}; {allowed}. {culprit}"


def compare(step: forge.Step, regions: Regions, options: Mapping[str, Any]) -> Comparison:
    """Run the first batch both ways, in training mode and with the same random numbers, without side effects.

    It is compiled for this alone, without CUDA graphs, and with torch's random numbers instead of the backend's, so
    that dropout is the same.
    """
    options, seen = comparable(options), ForwardRecorder(step.trainer.task)
    with without_side_effects(step.trainer), torch_random():
        batch = step.trainer.hooks.forge_prepare_batch(step, step.window[0])
        with regions.instead(), seen.dtypes():
            eager = _loss_and_gradients(step, batch)
        graphs = regions.make(options)
        with regions.instead(graphs):
            compiled = _loss_and_gradients(step, batch)
        dtype = seen.coarsest()
        tolerance = tolerance_for(dtype, step.trainer.env.device)
        worst = furthest(compiled, eager, tolerance)
        if worst.relative <= tolerance:
            return Comparison(worst, tolerance, dtype, ms=_milliseconds(step, batch, regions, graphs))
        with regions.instead():
            with seen.inputs():
                _loss_and_gradients(step, batch)
            inside = None if regions.whole else [region.name for region in regions.all]
            culprit = Search(step.trainer, seen, options, tolerance).first(inside)
    return Comparison(worst, tolerance, dtype, culprit)


def _milliseconds(step: forge.Step, batch: Any, regions: Regions, graphs: list[Region]) -> tuple[float, float]:
    """Time forward and backward, compiled and eager, in turns; return the medians."""
    compiled: list[float] = []
    eager: list[float] = []
    for _ in range(PASSES):
        for made, taken in ((graphs, compiled), ((), eager)):
            with regions.instead(made):
                step.trainer.env.synchronize()
                began = time.perf_counter()
                _loss_and_gradients(step, batch)
                step.trainer.env.synchronize()
                taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(compiled), statistics.median(eager)


def comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the same kernels without CUDA graphs, which would have to be recorded first."""
    modes = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    mode = options.get("mode")
    return {**options, "mode": modes.get(mode, mode)} if isinstance(mode, str) else dict(options)


def torch_random() -> AbstractContextManager[Any]:
    """Make code compiled inside the `with` draw the random numbers of eager code."""
    try:
        return internals.inductor_config.patch(fallback_random=True)
    except AttributeError:
        return nullcontext()


def _loss_and_gradients(step: forge.Step, batch: Any) -> dict[str, Tensor]:
    """Return loss and gradients by name, not in `.grad`; random state and buffers are restored."""
    trainer, own = step.trainer, {id(parameter) for parameter in step.parameters()}
    named = {n: p for n, p in trainer.task.named_parameters() if id(p) in own and p.requires_grad}
    with without_side_effects(trainer), torch.enable_grad():
        output = trainer.hooks.forge_forward(step, batch)
        check_training_output(output, trainer.task)
        loss = output if isinstance(output, Tensor) else output["loss"]
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(named, gradients, strict=True)
    return {"the loss": loss.detach(), **{f"the gradient of {n}": g for n, g in pairs if g is not None}}
