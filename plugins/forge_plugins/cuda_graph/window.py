"""A window as input of a graph: tensors in a fixed order, and the key of the graph that fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import forge

PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


class Unsuitable(Exception):
    """A window cannot be the input of a graph; the message is the reason."""


class GraphWindow:
    """The tensors of a step's micro-batches, and their weights if these differ from step to step.

    Plain numbers and strings in a batch are part of the key: a graph holds them as constants. Where an earlier turn of
    this update has prepared the batches, the prepared ones are the input.
    """

    def __init__(self, step: forge.Step, device: torch.device):
        self.is_prepared = bool(step.prepared)
        self.batches = step.prepared or step.window
        self.tensors: list[Tensor] = []
        kinds = tuple([_kind(batch, self.tensors) for batch in self.batches])  # runs on every update: a plain list
        factors = step.factors
        if factors is not None:
            self.tensors.append(_vector(factors, device))
        self.key = (kinds, step.divisor, factors is None, self.is_prepared)

    def with_tensors(self, tensors: list[Tensor]) -> list[Any]:
        """Return the window's batches with these tensors in place of its own."""
        given = iter(tensors)
        return [_rebuilt(batch, given) for batch in self.batches]

    def __str__(self) -> str:
        return ", ".join("×".join(map(str, tensor.shape)) or "a number" for tensor in self.tensors)


def _kind(value: Any, tensors: list[Tensor]) -> Any:
    """Return the part of the key for a value, and append its tensors to the list."""
    kind = type(value)
    if kind is Tensor and value.layout is torch.strided:
        tensors.append(value)
        return (value.shape, value.dtype, value.stride())
    if isinstance(value, (tuple, list)):
        return (kind, *[_kind(item, tensors) for item in value])
    if kind is dict:
        return (kind, *[(key, _kind(item, tensors)) for key, item in value.items()])
    if isinstance(value, PLAIN):
        return (kind, value)
    raise Unsuitable(f"a batch holds a {kind.__name__}, whose tensors are unknown")


def _rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        items = [_rebuilt(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _rebuilt(item, tensors) for key, item in value.items()}
    return value


def _vector(factors: list[float | Tensor], device: torch.device) -> Tensor:
    if any(isinstance(factor, Tensor) for factor in factors):
        return torch.stack([torch.as_tensor(f, dtype=torch.float64).to(device, non_blocking=True) for f in factors])
    return torch.tensor(factors, dtype=torch.float64)
