"""Generations: what CUDA graphs wrote last time, kept from what they write next."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Generations:
    """A model's call whose results outlive the next one.

    A CUDA graph writes its results to the same memory every time it runs. The loss waits for its log as a tensor, and
    the gradients of one micro-batch for those of the next; both are copied out of that memory in time.
    """

    def __init__(self, call: Callable[..., Any], task: nn.Module):
        self._call = call
        self._parameters = list(task.parameters())
        self._safe: dict[nn.Parameter, weakref.ref[Tensor]] = {}
        "Gradients in memory of their own."

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._keep_gradients()
        torch.compiler.cudagraph_mark_step_begin()
        return tree_map_only(Tensor, torch.clone, self._call(*args, **kwargs))

    def _keep_gradients(self) -> None:
        """Once for each parameter and window: what comes later is added in place."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            safe = self._safe.get(parameter)
            if safe is None or safe() is not gradient:
                parameter.grad = copied = gradient.clone()
                self._safe[parameter] = weakref.ref(copied)
