"""Statistics of module outputs: mean, spread, zeros, dead units, over all micro-batches of one window.

Forward hooks are placed on the modules for this window only, and read each output while it exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import forge
from forge.util.tensors import tensors_in
from forge_plugins.monitor.gradients import spread, widened
from forge_plugins.monitor.packing import Contents, histogram, stacked
from forge_plugins.torch_internals import current_autograd_node, is_functorch_wrapped

RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.Hardswish)
"""Modules whose output is exactly 0 where they are inactive."""
RANGES: dict[type[nn.Module], tuple[float, float]] = {
    nn.Sigmoid: (0.0, 1.0),
    nn.Tanh: (-1.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
    nn.Hardtanh: (-1.0, 1.0),
    nn.Softsign: (-1.0, 1.0),
}
"""Modules that pass no gradient on near the ends of their range."""
NEAR = 0.98
"""Distance from the middle of the range (1: its end) from which an output is saturated."""
UNITS = dict.fromkeys((nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention, nn.RNNBase), 0)
UNITS |= {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
UNITS |= {nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}
"""Modules by the number of output dimensions after their units."""


@dataclass(slots=True)
class Activation:
    """One module's output over a window."""

    mean: float = 0.0
    std: float = 0.0
    zeros: float = 0.0
    "The share of values that are exactly 0."
    dead: float = 0.0
    "The share of units that are 0 for every sample."
    saturated: float | None = None
    "The share of values near an end of the module's range, where it has one."
    evidence: int = 0
    "Values seen of each unit."

    def metrics(self) -> dict[str, float]:
        """Return the logged metrics."""
        found = {"mean": self.mean, "std": self.std, "zeros": self.zeros, "dead": self.dead}
        return found if self.saturated is None else {**found, "saturated": self.saturated}


@dataclass(slots=True)
class _Calls:
    """Statistics of a module's calls, on the device."""

    counts: list[int] = field(default_factory=list)
    numbers: list[Tensor] = field(default_factory=list)
    "For each call: standard deviation, mean, share of zeros, share of saturated values."
    largest: Tensor | None = None
    "For each unit, its largest magnitude so far."
    histogram: Tensor | None = None


class Activations:
    """Records every output of `modules` until it is closed."""

    def __init__(self, step: forge.Step, modules: Sequence[tuple[str, nn.Module]], count: bool, draw: bool):
        self._step, self._count, self._draw = step, count, draw
        self._calls: dict[str, _Calls] = {}
        self._unit_dim = -1
        self._handles: list[RemovableHandle] = []
        for name, module in modules:
            if name and (module._parameters or not module._modules):
                self._handles.append(module.register_forward_hook(self._hook(name)))

    def _hook(self, name: str) -> Callable[..., None]:
        def see(module: nn.Module, inputs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return  # inside a user's compiled function this hook has no effect
            # a replay runs the window again, and so does a backward through a checkpointed block
            if self._step.recording and current_autograd_node() is None:
                values = next((tensor for tensor in tensors_in(output) if _has_values(tensor)), None)
                if values is not None:
                    with torch.no_grad():
                        self._see(name, module, values.detach())

        return see

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _see(self, name: str, module: nn.Module, values: Tensor) -> None:
        calls = self._calls.setdefault(name, _Calls())
        self._follow(module)
        if self._draw and calls.histogram is None:
            calls.histogram = histogram(values)
        if not self._count:
            return
        wide = widened(values)
        calls.counts.append(wide.numel())
        calls.numbers += [*spread(wide), (wide == 0).float().mean(), _saturated(module, wide)]
        largest, before = _by_unit(wide, self._unit_dim), calls.largest
        calls.largest = largest if before is None or before.shape != largest.shape else torch.maximum(before, largest)

    def _follow(self, module: nn.Module) -> None:
        """Update the dimension that holds the units: a layer defines it for itself and following modules."""
        for kind, behind in UNITS.items():
            if isinstance(module, kind):
                self._unit_dim = -1 - behind

    # -- reading ------------------------------------------------------------------------------------------------------

    def pack(self) -> dict[str, Tensor]:
        """Return the tensors to read."""
        device, found = self._step.trainer.env.device, {}
        for name, calls in self._calls.items():
            if calls.numbers and calls.largest is not None:
                dead = (calls.largest == 0).float().mean()
                found[f"activation/{name}"] = stacked([*calls.numbers, dead], device)
            if calls.histogram is not None:
                found[f"histogram/activation/{name}"] = calls.histogram
        return found

    def read(self, contents: Contents) -> dict[str, Activation]:
        """Return the activations from the contents of `pack`, in call order."""
        return {
            name: self._merged(calls, contents[f"activation/{name}"])
            for name, calls in self._calls.items()
            if f"activation/{name}" in contents
        }

    def _merged(self, calls: _Calls, numbers: list[float]) -> Activation:
        assert calls.largest is not None
        total = sum(calls.counts)
        parts = list(zip(calls.counts, numbers[0:-1:4], numbers[1:-1:4], numbers[2:-1:4], numbers[3:-1:4], strict=True))
        mean = sum(n * part_mean for n, _, part_mean, _, _ in parts) / total
        squares = sum((n - 1) * std**2 + n * (part_mean - mean) ** 2 for n, std, part_mean, _, _ in parts)
        saturated = sum(n * share for n, _, _, _, share in parts) / total
        return Activation(
            mean=mean,
            std=math.sqrt(squares / max(total - 1, 1)),
            zeros=sum(n * zeros for n, _, _, zeros, _ in parts) / total,
            dead=numbers[-1],
            saturated=saturated if saturated >= 0 else None,
            evidence=total // calls.largest.numel(),
        )


def _has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values that can be read now."""
    return (
        tensor.is_floating_point()
        and tensor.numel() > 0
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        # inside torch.func a tensor must not outlive its transform
        and not is_functorch_wrapped(tensor)
    )


def _saturated(module: nn.Module, values: Tensor) -> Tensor:
    """Return the share of values near an end of the module's range; -1 without a range."""
    ends = RANGES.get(type(module))
    if ends is None:
        return values.new_full((), -1.0)
    middle, half = (ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 2
    return ((values - middle).abs() > NEAR * half).float().mean()


def _by_unit(values: Tensor, unit_dim: int) -> Tensor:
    """Return the largest magnitude of each unit over all samples and positions."""
    if values.ndim < 2:
        return torch.linalg.vector_norm(values, math.inf).reshape(1)
    units = values.ndim + (unit_dim if -unit_dim < values.ndim else -1)
    others = [dim for dim in range(values.ndim) if dim != units]
    return torch.linalg.vector_norm(values, math.inf, dim=others)
