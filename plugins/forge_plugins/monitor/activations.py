"""Statistics of module outputs: mean, spread and zeros, over all micro-batches of one window.

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


@dataclass(slots=True)
class _Calls:
    """Statistics of a module's calls, on the device."""

    counts: list[int] = field(default_factory=list)
    numbers: list[Tensor] = field(default_factory=list)
    "For each call: standard deviation, mean, share of zeros."
    histogram: Tensor | None = None


class Activations:
    """Records every output of `modules` until it is closed."""

    def __init__(self, step: forge.Step, modules: Sequence[tuple[str, nn.Module]], draw: bool):
        self._step, self._draw = step, draw
        self._calls: dict[str, _Calls] = {}
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
                        self._see(name, values.detach())

        return see

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _see(self, name: str, values: Tensor) -> None:
        calls, wide = self._calls.setdefault(name, _Calls()), widened(values)
        if self._draw and calls.histogram is None:
            calls.histogram = histogram(values)
        calls.counts.append(wide.numel())
        calls.numbers += [*spread(wide), (wide == 0).float().mean()]

    # -- reading ------------------------------------------------------------------------------------------------------

    def pack(self) -> dict[str, Tensor]:
        """Return the tensors to read."""
        device, found = self._step.trainer.env.device, {}
        for name, calls in self._calls.items():
            found[f"activation/{name}"] = stacked(calls.numbers, device)
            if calls.histogram is not None:
                found[f"histogram/activation/{name}"] = calls.histogram
        return found

    def read(self, contents: Contents) -> dict[str, float]:
        """Return the metrics from the contents of `pack`, in call order."""
        found: dict[str, float] = {}
        for name, calls in self._calls.items():
            for what, value in _merged(calls.counts, contents[f"activation/{name}"]).items():
                found[f"activation/{name}/{what}"] = value
        return found


def _merged(counts: list[int], numbers: list[float]) -> dict[str, float]:
    """Return the statistics of all calls of a module together."""
    total, parts = sum(counts), list(zip(counts, numbers[0::3], numbers[1::3], numbers[2::3], strict=True))
    mean = sum(n * part_mean for n, _, part_mean, _ in parts) / total
    squares = sum((n - 1) * std**2 + n * (part_mean - mean) ** 2 for n, std, part_mean, _ in parts)
    zeros = sum(n * share for n, _, _, share in parts) / total
    return {"mean": mean, "std": math.sqrt(squares / max(total - 1, 1)), "zeros": zeros}


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
