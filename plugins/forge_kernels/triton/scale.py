"""Multiply a gradient by the gradient of the loss, in place, without reading memory if it is 1, as usual."""

# A type checker cannot read Triton's language.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from forge_kernels.contract import device_of
from forge_kernels.torch_internals import is_last_backward


@triton.jit
def _scale(values, factor, count, BLOCK: tl.constexpr):
    """Compute values *= factor; read nothing if the factor is 1."""
    times = tl.load(factor)
    if times != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(values + at, mask=at < count, other=0).to(tl.float32)
            tl.store(values + at, (x * times).to(values.dtype.element_ty), mask=at < count)


@custom_op("forge::scale_", mutates_args=("values",))
def scale_(values: Tensor, factor: Tensor) -> None:
    """Compute values *= factor, one float on the device; leave memory untouched if it is 1."""
    if values.is_contiguous():
        programs = min(triton.cdiv(values.numel(), 8192), 1024)
        if programs:
            with device_of(values):
                _scale[(programs,)](values, factor, values.numel(), BLOCK=8192, num_warps=8)
    else:
        values.mul_(factor)


def times(gradient: Tensor, factor: Tensor) -> Tensor:
    """Return gradient · factor, for a backward: in place if the graph is used once, so that a factor of 1 is free."""
    if torch.compiler.is_compiling() or not is_last_backward():
        return gradient * factor
    scale_(gradient, factor)
    return gradient
