"""Cut the sequences of a batch: each rank gets a slice of every one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from forge.env import map_items
from forge.errors import DataError

MANY = 6
"""Entries of a batch that an error lists."""


@dataclass(frozen=True, slots=True)
class Slicing:
    """How sequences are divided among `size` ranks; with `balance` each has one slice of the head and one of the tail,
    so that all have as much causal attention to compute."""

    entries: tuple[str, ...]
    dim: int
    rank: int
    size: int
    balance: bool

    @property
    def multiple(self) -> int:
        """The number that the length of a sequence is a multiple of."""
        return self.size * (2 if self.balance else 1)

    def length(self, batch: Any) -> int:
        """Return the length of the batch's sequences; refuse one that cannot be divided."""
        found = _tensors(batch)
        for name in self.entries:
            if name not in found or found[name].ndim <= self.dim:
                raise DataError(
                    f"context_parallel.entries: the batch has no tensor {name!r} with a dimension {self.dim}; it has "
                    f"{_shown(found)}."
                )
        named = [found[name] for name in self.entries] or [t for t in found.values() if self._is_tokens(t)]
        if not named:
            raise DataError(
                f"context_parallel finds no tokens in the batch, which has {_shown(found)}. Name the tensors that hold "
                "the sequence in context_parallel.entries, by key or number, and their dimension in "
                "context_parallel.dim."
            )
        lengths = {tensor.shape[self.dim] for tensor in named} if self.entries else {named[0].shape[self.dim]}
        if len(lengths) > 1:
            raise DataError(f"context_parallel.entries have different lengths along dimension {self.dim}: {lengths}.")
        (length,) = lengths
        if not length or length % self.multiple:
            halves = " in two halves each, a head and a tail" if self.balance else ""
            other = ", or set context_parallel.balance=false" if self.balance and length % self.size == 0 else ""
            raise DataError(
                f"context_parallel: {self.size} ranks cannot divide a sequence of {length} positions evenly{halves}. "
                f"Use sequences of a multiple of {self.multiple}, or fewer ranks (context_parallel.size){other}."
            )
        return length

    def cut(self, batch: Any, length: int) -> Any:
        """Return this rank's slice of the batch."""
        own = None if self.balance else slice(self.rank * length // self.size, (self.rank + 1) * length // self.size)
        return self._mapped(batch, length, lambda tensor: self._slice(tensor, length, own))

    def shortened(self, batch: Any, length: int, shorter: int) -> Any:
        """Return the batch with the first positions of its sequences."""
        return self._mapped(batch, length, lambda tensor: tensor.narrow(self.dim, 0, shorter))

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's slice."""
        every = torch.arange(length, device=device)
        if not self.balance:
            return every.chunk(self.size)[self.rank]
        parts = every.chunk(2 * self.size)
        return torch.cat([parts[self.rank], parts[-1 - self.rank]])

    def _slice(self, tensor: Tensor, length: int, own: slice | None) -> Tensor:
        if own is not None:
            return tensor.narrow(self.dim, own.start, own.stop - own.start)
        each = length // (2 * self.size)
        head = tensor.narrow(self.dim, self.rank * each, each)
        return torch.cat([head, tensor.narrow(self.dim, length - (self.rank + 1) * each, each)], self.dim)

    def _is_tokens(self, tensor: Tensor) -> bool:
        whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        return whole and tensor.ndim > self.dim

    def _mapped(self, batch: Any, length: int, change: Callable[[Tensor], Tensor]) -> Any:
        def visit(path: str, tensor: Tensor) -> Tensor:
            named = path in self.entries if self.entries else True
            return change(tensor) if named and tensor.ndim > self.dim and tensor.shape[self.dim] == length else tensor

        return walk(batch, visit)


def walk(value: Any, visit: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Return a batch with `visit(path, tensor)` in place of each tensor; a path joins keys, fields and numbers by
    dots."""
    if isinstance(value, Tensor):
        return visit(path, value)
    names = iter(_names(value))

    def inside(item: Any) -> Any:
        name = next(names)
        return walk(item, visit, f"{path}.{name}" if path else str(name))

    mapped = map_items(value, inside)
    return value if mapped is None else mapped


def _names(value: Any) -> Iterable[Any]:
    if isinstance(value, MutableMapping):
        return list(value)
    if isinstance(value, (list, tuple)):
        return range(len(value))
    return [each.name for each in fields(value)] if is_dataclass(value) else ()


def _tensors(batch: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    walk(batch, lambda path, tensor: found.setdefault(path, tensor))
    return found


def _shown(found: dict[str, Tensor]) -> str:
    shown = [
        f"{name or 'one tensor'} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in found.items()
    ]
    return ", ".join(shown[:MANY]) + (", …" if len(shown) > MANY else "") if shown else "no tensors"
