"""Compare one batch eager and compiled."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import forge
from forge import torch_internals as internals
from forge.diagnose.checks import check_training_output
from forge.snapshot.sandbox import without_side_effects
from forge.torch_internals import pytree
from forge_plugins.compile.regions import Region, Regions

PASSES = 5
"""Timed passes, compiled and eager."""
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Tolerance relative to the largest entry of a tensor, by the least precise dtype used."""
MINIFIER = "TORCHDYNAMO_REPRO_AFTER=aot TORCHDYNAMO_REPRO_LEVEL=4"
"""What makes torch's minifier look for the smallest graph that computes something else than eager."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class CompiledDifference:
    """The difference of one tensor, absolute and relative to its size."""

    name: str
    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"{self.absolute:.3g} in {self.name}, {self.relative:.3g} of its size"


def furthest(ours: Tensors, theirs: Tensors, tolerance: float) -> CompiledDifference:
    """Return the largest relative difference of two sets of tensors; a tensor missing in one of them counts as 0.

    A gradient is compared with its own largest entry, or `tolerance` of the largest gradient if that is more: one that
    should be 0, as before a BatchNorm, is noise in both.
    """
    gradients = [_largest(tensor) for name, tensor in theirs.items() if name.startswith("the gradient")]
    floor = tolerance * max(gradients, default=0.0)
    found = []
    for name in dict.fromkeys([*theirs, *ours]):
        zero = torch.zeros_like(ours[name] if name in ours else theirs[name])
        found.append(_apart(name, ours.get(name, zero), theirs.get(name, zero), floor))
    return max(found, key=lambda difference: difference.relative)


def _apart(name: str, ours: Tensor, theirs: Tensor, floor: float) -> CompiledDifference:
    if ours.shape != theirs.shape:
        return CompiledDifference(name, math.inf, math.inf)
    if ours.numel() == 0:
        return CompiledDifference(name, 0.0, 0.0)
    a, b = _exact(ours), _exact(theirs)
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    absolute = math.inf if bool(gap.isnan().any()) else float(gap.max())
    scale = max(_largest(theirs), floor if name.startswith("the gradient") else 0.0)
    return CompiledDifference(name, absolute, absolute / scale if scale > 0 else (math.inf if absolute else 0.0))


def _exact(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.abs() if tensor.is_complex() else tensor.to(torch.float64)


def _largest(tensor: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    finite = torch.nan_to_num(_exact(tensor), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max())


def tolerance_for(dtype: torch.dtype, device: torch.device) -> float:
    """Return the allowed difference of two tensors, relative to their size."""
    if dtype is torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return TOLERANCES[torch.float16]  # TF32 has the mantissa of float16
    return TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing one batch."""

    worst: CompiledDifference
    tolerance: float
    dtype: torch.dtype
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
        return (
            f"compiled and eager disagree on the first batch: they differ by {self.worst}; {allowed}. torch's own "
            f"minifier looks for the operations: run again with {MINIFIER}."
        )


def compare(step: forge.Step, regions: Regions, options: Mapping[str, Any]) -> Comparison:
    """Run the first batch both ways, in training mode and with the same random numbers, without side effects.

    It is compiled for this alone, without CUDA graphs, and with torch's random numbers instead of the backend's, so
    that dropout is the same.
    """
    options, seen = comparable(options), DtypesSeen(step.trainer.task)
    with without_side_effects(step.trainer), torch_random():
        batch = step.trainer.hooks.forge_prepare_batch(step, step.window[0])
        with regions.instead(), seen.watching():
            eager = _loss_and_gradients(step, batch)
        graphs = regions.make(options)
        with regions.instead(graphs):
            compiled = _loss_and_gradients(step, batch)
        dtype = seen.coarsest()
        tolerance = tolerance_for(dtype, step.trainer.env.device)
        worst = furthest(compiled, eager, tolerance)
        agrees = worst.relative <= tolerance
        ms = _milliseconds(step, batch, regions, graphs) if agrees else None
    return Comparison(worst, tolerance, dtype, ms)


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


class DtypesSeen:
    """The dtypes that a task computes with: those of its parameters, and of its modules' outputs in a forward."""

    def __init__(self, task: nn.Module):
        self._task = task
        self._dtypes: set[torch.dtype] = {p.dtype for p in task.parameters() if p.is_floating_point()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the outputs of modules inside the `with`."""

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._dtypes |= {leaf.dtype for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)}

        with ExitStack() as stack:
            for name, module in self._task.named_modules():
                if name:
                    stack.callback(module.register_forward_hook(leave).remove)
            yield

    def coarsest(self) -> torch.dtype:
        """Return the least precise dtype used."""
        known = [dtype for dtype in self._dtypes if dtype in TOLERANCES]
        return max(known, key=lambda dtype: TOLERANCES[dtype], default=torch.float32)
