"""Statistics of module outputs: mean, spread and zeros, of the first call in one window.

Forward hooks are placed on the modules for this window only, and read the output while it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import forge
from forge.util.tensors import tensors_in
from forge_plugins.monitor.gradients import spread, widened
from forge_plugins.monitor.packing import Contents, histogram
from forge_plugins.torch_internals import current_autograd_node, is_functorch_wrapped


class Activations:
    """Records the first output of each of `modules` until it is closed."""

    def __init__(self, step: forge.Step, modules: Sequence[tuple[str, nn.Module]], draw: bool):
        self._step, self._draw = step, draw
        self.pack: dict[str, Tensor] = {}
        "The tensors to read, in call order."
        self._seen: set[str] = set()
        self._handles: list[RemovableHandle] = []
        for name, module in modules:
            if name and (module._parameters or not module._modules):
                self._handles.append(module.register_forward_hook(self._hook(name)))

    def _hook(self, name: str) -> Callable[..., None]:
        def see(module: nn.Module, inputs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return  # inside a user's compiled function this hook has no effect
            # a replay runs the window again, and so does a backward through a checkpointed block
            if self._step.recording and name not in self._seen and current_autograd_node() is None:
                values = next((tensor for tensor in tensors_in(output) if _has_values(tensor)), None)
                if values is not None:
                    self._see(name, values.detach())

        return see

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _see(self, name: str, values: Tensor) -> None:
        self._seen.add(name)
        wide = widened(values)
        std, mean = spread(wide)
        zeros = (wide == 0).float().mean()
        self.pack |= {f"activation/{name}/{what}": x for what, x in (("mean", mean), ("std", std), ("zeros", zeros))}
        if self._draw:
            self.pack[f"histogram/activation/{name}"] = histogram(values)

    def read(self, contents: Contents) -> dict[str, float]:
        """Return the metrics from the contents of `pack`."""
        return {name: contents[name][0] for name in self.pack if name.startswith("activation/")}


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
