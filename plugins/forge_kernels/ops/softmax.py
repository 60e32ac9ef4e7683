"""softmax over the last dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge.errors import KernelError
from forge_kernels.contract import (
    HALF_TO_FULL,
    Kernel,
    check_floating,
    falls_back,
    plain,
    triton_module,
    unusable,
)

ops = triton_module("softmax")

WIDEST = 32768
"""The widest supported row: it must fit the registers of a program."""


def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Return exp(x) / sum(exp(x)) over a dimension; the kernel supports the last one.

    The computation is in float32. The result has x's dtype, or `dtype` if given.
    """
    check_floating("softmax", x=x)
    if dtype is not None and not dtype.is_floating_point:
        raise KernelError(f"forge.kernels.softmax returns floating-point numbers, not {dtype}.")
    if not -x.dim() <= dim < x.dim():
        raise KernelError(f"forge.kernels.softmax has no dimension {dim} in x of shape {tuple(x.shape)}.")
    if falls_back("softmax", supports(x, dim, dtype)):
        return softmax_reference(x, dim, dtype)
    return ops.softmax(x, dtype or x.dtype)


def softmax_reference(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    return torch.softmax(x, dim, torch.promote_types(x.dtype, torch.float32)).to(dtype or x.dtype)


def supports(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> str | None:
    if dim not in (-1, x.dim() - 1):
        return "it supports the last dimension only"
    if dtype is not None and dtype not in HALF_TO_FULL:
        return "it returns bfloat16, float16 or float32"
    if x.dim() and x.shape[-1] > WIDEST:
        return f"it supports rows of at most {WIDEST} entries"
    return unusable(x)


def stand_in(
    original: Any, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    if (
        isinstance(input, Tensor)
        and plain(input)
        and dim is not None
        and input.dim() > 0
        and supports(input, dim, dtype) is None
    ):
        if dtype is None and input.is_cuda and torch.is_autocast_enabled("cuda"):
            dtype = torch.float32  # as under autocast
        return softmax(input, dim, dtype)
    return original(input, dim, _stacklevel, dtype)


SOFTMAX = Kernel(
    name="softmax",
    function=softmax,
    reference=softmax_reference,
    supports=supports,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
    replaces={"torch.nn.functional.softmax": stand_in},
)
