"""A window as what a graph is given: tensors in a fixed order, and a key that says which graph fits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import forge

PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


class Unsuitable(Exception):
    """Why a window cannot be given to a graph."""


class Window:
    """The tensors of a step's micro-batches, and the weights they count with where these differ from step to step.

    Plain numbers and strings in a batch are part of the key: a graph cannot be told new ones.
    """

    def __init__(self, step: forge.Step, device: torch.device):
        leaves, self.spec = pytree.tree_flatten(list(step.window))
        self.tensors: list[Tensor] = []
        kinds: list[Any] = []
        for leaf in leaves:
            if type(leaf) is Tensor and leaf.layout is torch.strided:
                self.tensors.append(leaf)
                kinds.append((leaf.shape, leaf.dtype))
            elif isinstance(leaf, PLAIN):
                kinds.append(leaf)
            else:
                raise Unsuitable(f"a batch holds a {type(leaf).__name__}, whose tensors are not known")
        self.leaves = leaves
        factors = step._factors
        if factors is not None:
            self.tensors.append(_vector(factors, device))
        self.key = (str(self.spec), tuple(kinds), step._divisor, factors is None)

    def with_tensors(self, tensors: list[Tensor]) -> list[Any]:
        """The window's batches with these in the place of its own."""
        given = iter(tensors)
        return pytree.tree_unflatten(
            [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec
        )

    def __str__(self) -> str:
        return ", ".join("×".join(map(str, tensor.shape)) or "a number" for tensor in self.tensors)


def _vector(factors: list[float | Tensor], device: torch.device) -> Tensor:
    if any(isinstance(factor, Tensor) for factor in factors):
        return torch.stack([torch.as_tensor(f, dtype=torch.float32).to(device, non_blocking=True) for f in factors])
    return torch.tensor(factors, dtype=torch.float32)
