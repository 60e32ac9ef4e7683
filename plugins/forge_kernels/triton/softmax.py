"""Softmax over rows and its backward, one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from forge_kernels.contract import device_of
from forge_kernels.triton.rows import as_rows, exp, row_grid, stages_that_fit


def forward_plan(block: int) -> tuple[int, int, int, int]:
    """Return rows at a time, warps, programs per multiprocessor (0: one turn each) and stages for a padded width."""
    if block > 16384:
        return 1, 32, 1, 4
    return max(1, 2048 // block), max(4, block // 1024), 0, 1


def backward_plan(block: int) -> tuple[int, int, int, int]:
    """Return the same for the backward pass."""
    return max(1, 2048 // block), max(4, min(16, block // 1024)), 0, 1


@triton.jit
def _forward(x, y, rows, width, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)
        value = tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
        value = exp(value - tl.max(value, 1)[:, None])
        value *= 1 / tl.sum(value, 1)[:, None]
        tl.store(y + row * width + column, value, mask=inside)


@triton.jit
def _backward(
    dy, y, dx, rows, width, dy_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    column = tl.arange(0, BLOCK)[None, :]
    turns = tl.cdiv(rows, ROWS)
    for turn in tl.range(tl.program_id(0), turns, tl.num_programs(0), num_stages=STAGES):
        # from the last row to the first: the last writes are still in the cache
        row = ((turns - 1 - turn) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)
        share = tl.load(y + row * y_stride + column, mask=inside, other=0).to(tl.float32)
        grad = tl.load(dy + row * dy_stride + column, mask=inside, other=0).to(tl.float32)
        result = share * (grad - tl.sum(share * grad, 1)[:, None])
        tl.store(dx + row * width + column, result, mask=inside)


@custom_op("forge::softmax", mutates_args=())
def softmax(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute softmax over the last dimension."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not x.numel():
        return y
    x = as_rows(x)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    at_once, warps, per_processor, stages = forward_plan(block)
    stages = stages_that_fit(stages, at_once * block * x.itemsize, x.device)
    per_processor = per_processor if stages > 1 else 0
    grid = row_grid(rows, at_once, per_processor, x.device)
    with device_of(x):
        _forward[grid](x, y, rows, width, x.stride(0), at_once, block, stages, num_warps=warps)
    return y


@softmax.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@custom_op("forge::softmax_backward", mutates_args=())
def softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    if not y.numel():
        return dx
    dy, y = as_rows(dy), as_rows(y)
    rows, width = y.shape
    block = triton.next_power_of_2(width)
    at_once, warps, per_processor, stages = backward_plan(block)
    grid = row_grid(rows, at_once, per_processor, y.device)
    with device_of(y):
        _backward[grid](dy, y, dx, rows, width, dy.stride(0), y.stride(0), at_once, block, stages, num_warps=warps)
    return dx


@softmax_backward.register_fake
def _(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(y.shape, dtype=dtype, device=y.device)


def _keep(ctx, inputs, output) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(output)


def _differentiate(ctx, dy):
    (y,) = ctx.saved_tensors
    return softmax_backward(dy, y, ctx.dtype), None


softmax.register_autograd(_differentiate, setup_context=_keep)
