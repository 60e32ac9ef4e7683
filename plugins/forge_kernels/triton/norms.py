"""RMSNorm and LayerNorm over rows: forward and backward, one pass each.

The backward pass runs on a fixed number of programs; each goes through many rows and keeps its own sums for the
gradients of weight and bias, which are added up afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from forge_kernels.contract import device_of
from forge_kernels.triton.rows import as_rows, row_grid, stages_that_fit


def forward_plan(block: int, centred: bool) -> tuple[int, int, int, int]:
    """Return rows at a time, warps, programs per multiprocessor (0: one turn each) and stages for a padded width."""
    if block <= 1024:
        return min(128, 4096 // block), 2, 0, 1
    if centred:
        return {2048: (1, 2, 16, 4), 4096: (1, 4, 8, 3), 8192: (1, 8, 2, 4)}[block]
    return 1, block // 1024 if block > 2048 else 4, 0, 1


def backward_plan(block: int) -> tuple[int, int, int, int]:
    """Return the same for the backward pass."""
    if block <= 1024:
        return min(128, 4096 // block), 4, 2, 4
    return {2048: (1, 4, 4, 3), 4096: (2, 8, 1, 3), 8192: (1, 8, 1, 3)}[block]


# In the kernels None stands for a missing weight or bias, or for an unwanted gradient; without `mean` it is RMSNorm.


@triton.jit
def _forward(
    x, weight, bias, y, mean, rstd, rows, width, x_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    within = column < width
    if weight is not None:
        w = tl.load(weight + column, mask=within, other=0).to(tl.float32)
    if bias is not None:
        b = tl.load(bias + column, mask=within, other=0).to(tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        exists = row < rows
        inside = exists[:, None] & within
        value = tl.load(x + row[:, None] * x_stride + column, mask=inside, other=0).to(tl.float32)
        if mean is not None:
            m = tl.sum(value, 1) / width
            tl.store(mean + row, m, mask=exists)
            value = tl.where(inside, value - m[:, None], 0.0)
        r = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
        tl.store(rstd + row, r, mask=exists)
        value *= r[:, None]
        if weight is not None:
            value *= w
        if bias is not None:
            value += b
        tl.store(y + row[:, None] * width + column, value, mask=inside)


@triton.jit
def _backward(
    dy, x, weight, mean, rstd, dx, dweight, dbias, rows, width, dy_stride, x_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    within = column < width
    if weight is not None:
        w = tl.load(weight + column, mask=within, other=0).to(tl.float32)[None, :]
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    turns = tl.cdiv(rows, ROWS)
    for turn in tl.range(program, turns, tl.num_programs(0), num_stages=STAGES):
        # from the last row to the first: the last writes are still in the cache
        row = ((turns - 1 - turn) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        exists = row < rows
        inside = exists[:, None] & within[None, :]
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0).to(tl.float32)
        grad = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0).to(tl.float32)
        r = tl.load(rstd + row, mask=exists, other=0)[:, None]
        if mean is not None:
            value -= tl.load(mean + row, mask=exists, other=0)[:, None]
        normal = value * r
        if dweight is not None:
            weight_sum += tl.sum(grad * normal, 0)
        if dbias is not None:
            bias_sum += tl.sum(grad, 0)
        if weight is not None:
            grad *= w
        if mean is not None:
            # two sums in one reduction, since its synchronization is the cost
            along, shift = tl.split(tl.sum(tl.join(grad * normal, grad), 1) / width)
            result = (grad - shift[:, None] - normal * along[:, None]) * r
        else:
            along = tl.sum(grad * normal, 1) / width
            result = (grad - normal * along[:, None]) * r
        tl.store(dx + row[:, None] * width + column[None, :], result, mask=inside)
    if dweight is not None:
        tl.store(dweight + program * width + column, weight_sum, mask=within)
    if dbias is not None:
        tl.store(dbias + program * width + column, bias_sum, mask=within)


def _forward_outputs(x: Tensor, centred: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate y, mean and 1 / deviation; the mean is empty if not needed."""
    rows = x.shape[:-1].numel()
    return (
        torch.empty(x.shape, dtype=dtype, device=x.device),
        torch.empty(rows if centred else 0, dtype=torch.float32, device=x.device),
        torch.empty(rows, dtype=torch.float32, device=x.device),
    )


@custom_op("forge::norm", mutates_args=())
def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute LayerNorm if `centred`, else RMSNorm."""
    outputs = _forward_outputs(x, centred, dtype)
    if not x.numel():
        return outputs
    y, mean, rstd = outputs
    x = as_rows(x)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    at_once, warps, per_processor, stages = forward_plan(block, centred)
    stages = stages_that_fit(stages, at_once * block * x.itemsize, x.device)
    per_processor = per_processor if stages > 1 else 0
    with device_of(x):
        _forward[row_grid(rows, at_once, per_processor, x.device)](
            x, _contiguous(weight), _contiguous(bias), y, mean if centred else None, rstd,
            rows, width, x.stride(0), eps, at_once, block, stages, num_warps=warps,
        )  # fmt: skip
    return outputs


@norm.register_fake
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward_outputs(x, centred, dtype)


@custom_op("forge::norm_backward", mutates_args=())
def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x, and those of weight and bias in float32, empty if not wanted."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return dx, *(x.new_zeros(x.shape[-1] if want else 0, dtype=torch.float32) for want in wanted)
    dy, x = as_rows(dy), as_rows(x)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    at_once, warps, per_processor, stages = backward_plan(block)
    stages = stages_that_fit(stages, at_once * block * (x.itemsize + dy.itemsize), x.device)
    grid = row_grid(rows, at_once, per_processor, x.device)
    sums = [torch.empty(grid[0], width if want else 0, dtype=torch.float32, device=x.device) for want in wanted]
    dweight, dbias = (part if part.numel() else None for part in sums)
    with device_of(x):
        _backward[grid](
            dy, x, _contiguous(weight), mean, rstd, dx, dweight, dbias,
            rows, width, dy.stride(0), x.stride(0), at_once, block, stages, num_warps=warps,
        )  # fmt: skip
    return dx, sums[0].sum(0), sums[1].sum(0)


@norm_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return dx, *(x.new_empty(x.shape[-1] if want else 0, dtype=torch.float32) for want in wanted)


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _keep(ctx, inputs, output) -> None:
    x, weight, bias, _, centred, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, mean if centred else None, rstd)
    ctx.dtypes = [None if vector is None else vector.dtype for vector in (weight, bias)]


def _differentiate(ctx, dy, *_):
    wanted = list(ctx.needs_input_grad[1:3])
    dx, *vectors = norm_backward(dy, *ctx.saved_tensors, wanted)
    dweight, dbias = (d.to(t) if want else None for d, t, want in zip(vectors, ctx.dtypes, wanted, strict=True))
    return dx, dweight, dbias, None, None, None


norm.register_autograd(_differentiate, setup_context=_keep)
