"""Find out why a model failed on a request: because of the request's values, of its sizes, or of neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from forge.util.oom import is_out_of_memory
from forge_ship.engine import ExportError, Port, shape_text
from forge_ship.serving.protocol import dtype_of

Compute = Callable[[Mapping[str, Tensor], int], object]
"""Computes inputs of a number of rows; what it returns is not used."""


def reason_to_reject(
    error: BaseException, inputs: Mapping[str, Tensor], rows: int, ports: Sequence[Port], compute: Compute
) -> str | None:
    """Return what is wrong with a request on which the model failed; None if the model itself may be.

    The model computes zeros instead. If it can, the values are to blame, and where there are several inputs the one
    without which it can. If it cannot, but computes a single row of the sizes that it is known to take, the sizes are.
    """
    if not isinstance(error, Exception) or isinstance(error, ExportError) or is_out_of_memory(error):
        return None
    zeros = {name: torch.zeros_like(tensor) for name, tensor in inputs.items()}
    if _computes(compute, zeros, rows):
        single = len(inputs) == 1
        blamed = [name for name in inputs if single or _computes(compute, {**inputs, name: zeros[name]}, rows)]
        named = " and ".join(_with_range(name, inputs[name]) for name in blamed[:1] or inputs)
        return f"The model fails on the values of {named}; it computes zeros of that shape. Send values that it knows."
    known = {port.name: zeros_of(port, 1) for port in ports}
    if _computes(compute, known, 1):
        given, taken = _shapes(inputs), _shapes(known)
        return f"The model fails on inputs of these sizes: {given}; it computes {taken}. Send other sizes."
    return None


def zeros_of(port: Port, rows: int) -> Tensor:
    """Return zeros of an input's shape; a dynamic axis has the least size that the data had."""
    seen = port.seen or {}
    sizes = [
        rows if size == "batch" else seen.get(size, (1, 1))[0] if isinstance(size, str) else size for size in port.shape
    ]
    return torch.zeros(sizes, dtype=dtype_of(port))


def _computes(compute: Compute, inputs: Mapping[str, Tensor], rows: int) -> bool:
    try:
        compute(inputs, rows)
    except BaseException:  # this runs in the engine's thread, which must not end
        return False
    return True


def _with_range(name: str, tensor: Tensor) -> str:
    """Name an input; integers, which are often indices, with the least and the largest."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or not tensor.numel():
        return name
    least, largest = torch.aminmax(tensor)
    return f"{name} ({least.item()} to {largest.item()})"


def _shapes(inputs: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} of {shape_text(tensor.shape)}" for name, tensor in inputs.items())
