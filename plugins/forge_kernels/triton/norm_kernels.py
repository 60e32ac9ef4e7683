"""The kernels of `forge::norm`: RMSNorm if `mean` is None, else LayerNorm.

None stands for a missing residual or weight, or an unwanted gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward(
    x,
    residual,
    weight,
    bias,
    y,
    h,
    mean,
    rstd,
    rows,
    width,
    x_stride,
    residual_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
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
        at = row[:, None] * width + column
        value = tl.load(x + row[:, None] * x_stride + column, mask=inside, other=0).to(tl.float32)
        if residual is not None:
            value += tl.load(residual + row[:, None] * residual_stride + column, mask=inside, other=0).to(tl.float32)
            rounded = value.to(h.dtype.element_ty)
            tl.store(h + at, rounded, mask=inside)
            value = rounded.to(tl.float32)
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
        tl.store(y + at, value, mask=inside)


@triton.jit
def forward_wide(
    x, residual, weight, bias, y, h, mean, rstd, width, x_stride, residual_stride, eps, CHUNK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    middle = 0.0
    squares = 0.0
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < width
        value = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
        if residual is not None:
            value += tl.load(residual + row * residual_stride + column, mask=inside, other=0).to(tl.float32)
            rounded = value.to(h.dtype.element_ty)
            tl.store(h + row * width + column, rounded, mask=inside)
            value = rounded.to(tl.float32)
        if mean is not None:
            # combine mean and squared deviations of the previous chunks and of this one
            count = tl.minimum(width - start, CHUNK)
            m = tl.sum(value, 0) / count
            value = tl.where(inside, value - m, 0.0)
            away = m - middle
            middle += away * count / (start + count)
            squares += away * away * start / (start + count) * count
        squares += tl.sum(value * value, 0)
    r = tl.rsqrt(squares / width + eps)
    if mean is not None:
        tl.store(mean + row, middle)
    tl.store(rstd + row, r)
    tl.debug_barrier()  # other threads than the writers read h below
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < width
        if residual is not None:
            value = tl.load(h + row * width + column, mask=inside, other=0).to(tl.float32)
        else:
            value = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
        value = (value - middle) * r
        if weight is not None:
            value *= tl.load(weight + column, mask=inside, other=0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + column, mask=inside, other=0).to(tl.float32)
        tl.store(y + row * width + column, value, mask=inside)


@triton.jit
def backward(
    dy,
    dh,
    h,
    weight,
    mean,
    rstd,
    dx,
    dbranch,
    dweight,
    dbias,
    rows,
    width,
    dy_stride,
    dh_stride,
    h_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
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
        value = tl.load(h + row[:, None] * h_stride + column[None, :], mask=inside, other=0).to(tl.float32)
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
        if dh is not None:
            result += tl.load(dh + row[:, None] * dh_stride + column[None, :], mask=inside, other=0).to(tl.float32)
        at = row[:, None] * width + column[None, :]
        tl.store(dx + at, result, mask=inside)
        if dbranch is not None:
            tl.store(dbranch + at, result, mask=inside)
    if dweight is not None:
        tl.store(dweight + program * width + column, weight_sum, mask=within)
    if dbias is not None:
        tl.store(dbias + program * width + column, bias_sum, mask=within)


@triton.jit
def backward_wide(
    dy, dh, h, weight, mean, rstd, dx, dbranch, width, dy_stride, dh_stride, h_stride, CHUNK: tl.constexpr
):
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    r = tl.load(rstd + row)
    m = 0.0
    if mean is not None:
        m = tl.load(mean + row)
    along = 0.0
    shift = 0.0
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < width
        normal = (tl.load(h + row * h_stride + column, mask=inside, other=0).to(tl.float32) - m) * r
        grad = tl.load(dy + row * dy_stride + column, mask=inside, other=0).to(tl.float32)
        if weight is not None:
            grad *= tl.load(weight + column, mask=inside, other=0).to(tl.float32)
        along += tl.sum(grad * normal, 0)
        if mean is not None:
            shift += tl.sum(grad, 0)
    along /= width
    shift /= width
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < width
        normal = (tl.load(h + row * h_stride + column, mask=inside, other=0).to(tl.float32) - m) * r
        grad = tl.load(dy + row * dy_stride + column, mask=inside, other=0).to(tl.float32)
        if weight is not None:
            grad *= tl.load(weight + column, mask=inside, other=0).to(tl.float32)
        result = (grad - shift - normal * along) * r
        if dh is not None:
            result += tl.load(dh + row * dh_stride + column, mask=inside, other=0).to(tl.float32)
        tl.store(dx + row * width + column, result, mask=inside)
        if dbranch is not None:
            tl.store(dbranch + row * width + column, result, mask=inside)


@triton.jit
def sums_wide(
    dy,
    h,
    mean,
    rstd,
    dweight,
    dbias,
    rows,
    width,
    dy_stride,
    h_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < width
    weight_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    bias_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        exists = row < rows
        inside = exists[:, None] & within[None, :]
        value = tl.load(h + row[:, None] * h_stride + column[None, :], mask=inside, other=0).to(tl.float32)
        grad = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0).to(tl.float32)
        if mean is not None:
            value -= tl.load(mean + row, mask=exists, other=0)[:, None]
        weight_sum += grad * value * tl.load(rstd + row, mask=exists, other=0)[:, None]
        bias_sum += grad
    at = tl.program_id(1) * width + column
    if dweight is not None:
        tl.store(dweight + at, tl.sum(weight_sum, 0), mask=within)
    if dbias is not None:
        tl.store(dbias + at, tl.sum(bias_sum, 0), mask=within)


@triton.jit
def add_up(partials, dweight, dbias, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum over programs: program (i, 0) the first kind in `partials`, program (i, 1) the second."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < width
    kind = tl.program_id(1)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & within[None, :]
        total += tl.load(partials + (kind * count + row)[:, None] * width + column[None, :], mask=inside, other=0)
    result = tl.sum(total, 0)
    if dweight is None:
        tl.store(dbias + column, result, mask=within)
    elif dbias is None or kind == 0:
        tl.store(dweight + column, result, mask=within)
    else:
        tl.store(dbias + column, result, mask=within)
