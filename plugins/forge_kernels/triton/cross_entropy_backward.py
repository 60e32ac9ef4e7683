"""The gradient of logits in backward, from the maximum and sum of each row."""

from __future__ import annotations

import triton
import triton.language as tl

from forge_kernels.triton.base2 import exp, log


@triton.jit
def backward(
    grad, grad_stride, logits, target, tops, totals, scale, gradient, columns, stride, ignore, smoothing, z_loss,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of BLOCK logits of one row."""
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(target + row)
    gradient += row * columns
    if label == ignore:
        tl.store(gradient + at, tl.zeros((BLOCK,), gradient.dtype.element_ty), mask=at < columns)
    else:
        x = tl.load(logits + row * stride + at, mask=at < columns, other=0).to(tl.float32)
        top = tl.load(tops + row)
        total = tl.load(totals + row)
        times = tl.load(grad + row * grad_stride) * tl.load(scale)
        times = tl.where((label >= 0) & (label < columns), times, float("nan"))
        slope = (1 + 2 * z_loss * (top + log(total))) / total
        d = exp(x - top) * slope - smoothing / columns - tl.where(at == label, 1 - smoothing, 0.0)
        tl.store(gradient + at, (d * times).to(gradient.dtype.element_ty), mask=at < columns)
