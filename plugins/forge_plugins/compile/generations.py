"""Keep results of CUDA graphs from being overwritten by the next replay."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forge.torch_internals import pytree


class Generations:
    """A model's call whose results outlive the next call.

    A CUDA graph writes its results to the same memory every time. The loss is kept as a tensor until its log, and the
    gradients of one micro-batch until the next; both are copied out of that memory in time.
    """

    def __init__(self, call: Callable[..., Any], task: nn.Module):
        self._call = call
        self._parameters = list(task.parameters())
        self._safe: dict[nn.Parameter, weakref.ref[Tensor]] = {}
        "Gradients in their own memory."

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._keep_gradients()
        torch.compiler.cudagraph_mark_step_begin()
        return pytree.tree_map_only(Tensor, torch.clone, self._call(*args, **kwargs))

    def _keep_gradients(self) -> None:
        """Copy each gradient once per window; later ones are added in place."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            safe = self._safe.get(parameter)
            if safe is None or safe() is not gradient:
                parameter.grad = copied = gradient.clone()
                self._safe[parameter] = weakref.ref(copied)
