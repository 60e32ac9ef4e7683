"""Cut a batch into equal micro-batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge.env import map_items
from forge.errors import DataError


def cut_batch(batch: Any, most: int) -> list[Any]:
    """Return the batch in equal parts along the first dimension of its tensors, as many as divide it, up to `most`."""
    size = batch_size(batch)
    if not size:
        raise DataError(f"pipeline cannot cut a {type(batch).__name__} batch: it has no tensor with samples.")
    count = max(number for number in range(1, most + 1) if size % number == 0)
    each = size // count
    return [_part(batch, size, begin, begin + each) for begin in range(0, size, each)]


def _part(value: Any, size: int, begin: int, end: int) -> Any:
    if isinstance(value, Tensor):
        return value[begin:end] if value.ndim and value.shape[0] == size else value
    if type(value) is list and len(value) == size and not isinstance(value[0], Tensor):
        return value[begin:end]
    parts = map_items(value, lambda item: _part(item, size, begin, end))
    return value if parts is None else parts


def shapes_of(value: Any) -> Any:
    """Return a key of the shapes and types of a batch's tensors."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((key, shapes_of(item)) for key, item in value.items())
    return tuple(map(shapes_of, value)) if isinstance(value, (list, tuple)) else type(value).__name__
