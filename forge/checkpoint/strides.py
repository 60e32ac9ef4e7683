"""Strides of tensors: files hold tensors in row-major order; the document notes the strides of all others.

Kernels may add in the order of the memory, so an optimizer continues bit for bit only with the strides that it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from forge.checkpoint import sharding
from forge.checkpoint.tensors import are_sizes
from forge.errors import CheckpointError

MAX_SPREAD = 4
"""Entries of memory per entry of a tensor with gaps; one with larger gaps is loaded without them, in its order."""


def strides_to_note(tensor: Tensor) -> list[int] | None:
    """Return the strides that a loaded tensor needs, or None for row-major order. A DTensor's are not noted, nor
    those of a parameter that has no shape yet."""
    if is_lazy(tensor) or sharding.is_distributed(tensor) or not tensor.numel():
        return None
    strides = tensor.stride()
    if strides == row_major(tensor.shape):
        return None
    if not _is_possible(tensor.shape, strides):
        strides = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
    return None if strides == row_major(tensor.shape) else list(strides)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def check_strides(shape: Sequence[int], strides: Any, name: str) -> tuple[int, ...]:
    """Return noted strides; raise CheckpointError for values that do not fit the shape."""
    fits = are_sizes(strides) and len(strides) == len(shape) and 0 not in shape and max(strides, default=0) < 2**62
    if not fits or not _is_possible(shape, strides):
        raise CheckpointError(f"the strides of {name[:80]!r} do not fit its shape {list(shape)}.")
    return tuple(strides)


def with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a copy of a tensor with these strides; entries along a stride of 0 must be equal."""
    shape = tensor.shape
    source = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in strides)] if 0 in strides else tensor
    made = torch.empty_strided(source.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device)
    made.copy_(source)
    return made.as_strided(shape, tuple(strides))


def _is_possible(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether memory for such a tensor can be made: no entries overlap, except along a stride of 0; no large gaps."""
    extent = entries = 1
    for step, size in sorted((step, size) for step, size in zip(strides, shape, strict=True) if size > 1 and step):
        if step < extent:
            return False
        extent += (size - 1) * step
        entries *= size
    return extent <= MAX_SPREAD * entries
