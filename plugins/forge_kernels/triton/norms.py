"""RMSNorm and LayerNorm over rows, with the residual addition before them: forward and backward, one pass each.

The backward pass runs on a fixed number of programs; each goes through many rows and keeps its own sums for the
gradients of weight and bias, which a second, small kernel adds up in a fixed order. Rows too wide for the registers of
a program are read twice, by other kernels.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.library import custom_op

from forge_kernels.contract import device_of
from forge_kernels.triton import norm_kernels as kernels
from forge_kernels.triton.rows import as_rows, row_grid, stages_that_fit

WIDEST_FORWARD, WIDEST_BACKWARD = 16384, 8192
CHUNK = 4096
ADD_UP = 128, 16, 8
"""Rows, columns and warps of a program that adds up partial sums."""


def forward_plan(block: int, centred: bool) -> tuple[int, int, int, int]:
    """Return rows at a time, warps, programs per multiprocessor (0: one turn each) and stages for a padded width."""
    if block <= 1024:
        return min(128, 4096 // block), 2, 0, 1
    if centred:
        return {2048: (1, 2, 16, 4), 4096: (1, 4, 8, 3), 8192: (1, 8, 2, 4), 16384: (1, 16, 1, 4)}[block]
    return 1, block // 1024 if block > 2048 else 4, 0, 1


def backward_plan(block: int) -> tuple[int, int, int, int]:
    """Return the same for the backward pass."""
    if block <= 1024:
        return min(128, 4096 // block), 4, 2, 4
    return {2048: (1, 4, 4, 3), 4096: (2, 8, 1, 3), 8192: (1, 8, 1, 3)}[block]


def _stream_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype:
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def _forward_outputs(
    x: Tensor, residual: Tensor | None, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate y, x + residual, mean and 1 / deviation; empty if not needed."""
    shape, device, rows = x.shape, x.device, x.shape[:-1].numel()
    return (
        torch.empty(shape, dtype=dtype, device=device),
        torch.empty(shape if residual is not None else 0, dtype=_stream_dtype(x, residual), device=device),
        torch.empty(rows if centred else 0, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


@custom_op("forge::norm", mutates_args=())
def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch LayerNorm if `centred`, else RMSNorm."""
    outputs = _forward_outputs(x, residual, centred, dtype)
    if not x.numel():
        return outputs
    y, h, mean, rstd = outputs
    mean = mean if centred else None
    weight, bias = _contiguous(weight), _contiguous(bias)
    x = as_rows(x)
    residual = None if residual is None else as_rows(residual)
    residual_stride = 0 if residual is None else residual.stride(0)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    if block > WIDEST_FORWARD:
        with device_of(x):
            kernels.forward_wide[(rows,)](
                x, residual, weight, bias, y, h, mean, rstd,
                width, x.stride(0), residual_stride, eps, CHUNK, num_warps=8,
            )  # fmt: skip
        return outputs
    at_once, warps, per_processor, stages = forward_plan(block, centred)
    loaded = at_once * block * (x.itemsize + (0 if residual is None else residual.itemsize))
    stages = stages_that_fit(stages, loaded, x.device)
    per_processor = per_processor if stages > 1 else 0
    with device_of(x):
        kernels.forward[row_grid(rows, at_once, per_processor, x.device)](
            x, residual, weight, bias, y, h, mean, rstd,
            rows, width, x.stride(0), residual_stride, eps, at_once, block, stages, num_warps=warps,
        )  # fmt: skip
    return outputs


@norm.register_fake
def _(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _forward_outputs(x, residual, centred, dtype)


def _backward_outputs(
    h: Tensor, x_dtype: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of h, of x if its dtype differs, and of weight and bias if wanted; else empty."""
    width = h.shape[-1]
    return (
        torch.empty(h.shape, dtype=h.dtype, device=h.device),
        torch.empty(h.shape if x_dtype != h.dtype else 0, dtype=x_dtype, device=h.device),
        torch.empty(0 if weight is None else width, dtype=weight or torch.float32, device=h.device),
        torch.empty(0 if bias is None else width, dtype=bias or torch.float32, device=h.device),
    )


@custom_op("forge::norm_backward", mutates_args=())
def norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A dtype of None means that the gradient of weight, or of bias, is not wanted."""
    outputs = _backward_outputs(h, x_dtype, weight_dtype, bias_dtype)
    dx, dbranch, dweight, dbias = outputs
    if not h.numel():
        dweight.zero_()
        dbias.zero_()
        return outputs
    dbranch = dbranch if x_dtype != h.dtype else None
    weight = _contiguous(weight)
    dy, h = as_rows(dy), as_rows(h)
    dh = None if dh is None else as_rows(dh)
    dh_stride = 0 if dh is None else dh.stride(0)
    rows, width = h.shape
    block = triton.next_power_of_2(width)
    wide = block > WIDEST_BACKWARD
    at_once, warps, per_processor, stages = (4, 4, 1, 1) if wide else backward_plan(block)
    loaded = at_once * block * (h.itemsize + dy.itemsize + (0 if dh is None else dh.itemsize))
    stages = stages_that_fit(stages, loaded, h.device)
    grid = row_grid(rows, at_once, per_processor, h.device)
    wanted = [dtype is not None for dtype in (weight_dtype, bias_dtype)]
    partials = torch.empty(sum(wanted), grid[0], width, dtype=torch.float32, device=h.device)
    weight_sums = partials[0] if wanted[0] else None
    bias_sums = partials[-1] if wanted[1] else None
    with device_of(h):
        if not wide:
            kernels.backward[grid](
                dy, dh, h, weight, mean, rstd, dx, dbranch, weight_sums, bias_sums,
                rows, width, dy.stride(0), dh_stride, h.stride(0), at_once, block, stages, num_warps=warps,
            )  # fmt: skip
        else:
            kernels.backward_wide[(rows,)](
                dy, dh, h, weight, mean, rstd, dx, dbranch,
                width, dy.stride(0), dh_stride, h.stride(0), CHUNK, num_warps=8,
            )  # fmt: skip
        if wide and any(wanted):
            columns = 512
            kernels.sums_wide[(triton.cdiv(width, columns), grid[0])](
                dy, h, mean, rstd, weight_sums, bias_sums,
                rows, width, dy.stride(0), h.stride(0), at_once, columns, num_warps=warps,
            )  # fmt: skip
        if any(wanted):
            together, columns, warps = ADD_UP
            kernels.add_up[(triton.cdiv(width, columns), sum(wanted))](
                partials, dweight if wanted[0] else None, dbias if wanted[1] else None,
                grid[0], width, together, columns, num_warps=warps,
            )  # fmt: skip
    return outputs


@norm_backward.register_fake
def _(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _backward_outputs(h, x_dtype, weight_dtype, bias_dtype)


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _keep(ctx, inputs, output) -> None:
    x, residual, weight, bias, _, centred, _ = inputs
    _, h, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else h, weight, mean if centred else None, rstd)
    ctx.x_dtype = x.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.weight_dtype = None if weight is None else weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _differentiate(ctx, dy, dh, dmean, drstd):
    h, weight, mean, rstd = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(h)
    dx, dbranch, dweight, dbias = norm_backward(
        dy,
        None if ctx.residual_dtype is None else dh,
        h,
        weight,
        mean,
        rstd,
        ctx.x_dtype,
        ctx.weight_dtype if ctx.needs_input_grad[2] else None,
        ctx.bias_dtype if ctx.needs_input_grad[3] else None,
    )
    return (
        dx if ctx.x_dtype == h.dtype else dbranch,
        None if ctx.residual_dtype is None else dx.to(ctx.residual_dtype),
        dweight if ctx.needs_input_grad[2] else None,
        dbias if ctx.needs_input_grad[3] else None,
        None,
        None,
        None,
    )


norm.register_autograd(_differentiate, setup_context=_keep)
