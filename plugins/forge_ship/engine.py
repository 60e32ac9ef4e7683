"""Engine: something that computes a model's outputs, whatever format the model has. Servers, benchmarks and the
verification of exports know no more of a model than this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from forge.errors import ForgeError


class ExportError(ForgeError):
    """An export, or a model that was exported, that cannot be made, verified or used."""


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output tensor of a model."""

    name: str
    dtype: str
    'As torch names it, without "torch.": "float32".'
    shape: tuple[int | str, ...]
    'Sizes; a dynamic axis has a name, as in ("batch", 1, 28, 28).'
    seen: Mapping[str, tuple[int, int]] | None = None
    "The least and the largest size that the data had, by dynamic axis."


class Engine(Protocol):
    """A model that is ready to run. Not safe to call from several threads at once."""

    inputs: Sequence[Port]
    outputs: Sequence[Port]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the outputs by name. Inputs are on the CPU or on the engine's device; outputs are on the CPU."""
        ...


def row_bytes(ports: Sequence[Port]) -> int:
    """Return what one row of tensors takes, with the least sizes that the data had."""
    sizes = ([_least(size, port) for size in port.shape] for port in ports)
    return sum(prod(each) * getattr(torch, port.dtype).itemsize for each, port in zip(sizes, ports, strict=True))


def _least(size: int | str, port: Port) -> int:
    return size if isinstance(size, int) else 1 if size == "batch" else (port.seen or {}).get(size, (1, 1))[0]


def check_inputs(given: Mapping[str, Tensor], ports: Sequence[Port]) -> int | None:
    """Refuse tensors of other names, dtypes or shapes than a model takes; return the size of the axis "batch"."""
    expected = {port.name for port in ports}
    if given.keys() != expected:
        raise ExportError(
            f"The model takes {', '.join(sorted(expected))}; it got {', '.join(sorted(given)) or 'nothing'}."
        )
    sizes: dict[str, int] = {}
    for port in ports:
        tensor = given[port.name]
        if str(tensor.dtype) != f"torch.{port.dtype}":
            raise ExportError(f"{port.name} must be {port.dtype}; it is {str(tensor.dtype).removeprefix('torch.')}.")
        fits = tensor.dim() == len(port.shape) and all(
            size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
            for size, wanted in zip(tensor.shape, port.shape, strict=True)
        )
        if not fits:
            is_sample = tensor.dim() == len(port.shape) - 1 and port.shape[0] == "batch"
            hint = " Put a single sample into a list of one." if is_sample else ""
            shown = shape_text(tensor.shape) if tensor.dim() <= 16 else f"{tensor.dim()} axes"
            raise ExportError(f"{port.name} must have the shape {shape_text(port.shape)}; it has {shown}.{hint}")
    return sizes.get("batch")


def shape_text(shape: Sequence[Any]) -> str:
    """Write a shape as people read it: batch × 1 × 28 × 28."""
    return " × ".join(map(str, shape)) or "a single number"
