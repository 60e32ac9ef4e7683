"""Clip + AdamW over any number of tensors in three launches: squares of the gradients; their norm and the factors of
this update; the update.

A device table has one row of addresses per tensor, and a list of chunks assigns parts of tensors to programs
(see :mod:`forge_kernels.ops.clip_adamw_tables`). All sums have a fixed order, so that the same gradients give the same
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge_kernels.contract import device_of
from forge_kernels.ops.clip_adamw_tables import CHUNK, ClipPlan

# the columns of a tensor's row
PARAM = tl.constexpr(0)
GRAD = tl.constexpr(1)
EXP_AVG = tl.constexpr(2)
EXP_AVG_SQ = tl.constexpr(3)
STEP = tl.constexpr(4)
SIZE = tl.constexpr(5)
GROUP = tl.constexpr(6)
COUNTS = tl.constexpr(7)
# the columns of a group's settings
LR = tl.constexpr(0)
BETA1 = tl.constexpr(1)
BETA2 = tl.constexpr(2)
EPS = tl.constexpr(3)
DECAY = tl.constexpr(4)
LR_AT = tl.constexpr(5)
COLUMNS = tl.constexpr(8)  # of either, and of a tensor's rates, which only _settle and _advance use

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

SQUARES = {"CHUNK": CHUNK, "num_warps": 8}
SETTLE = {"BLOCK": 4096, "ROWS": 128, "num_warps": 8}
UPDATE = {"CHUNK": CHUNK, "BLOCK": 1024, "num_warps": 4}


@triton.jit
def _address(tensors, row, column: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(tensors + row * COLUMNS + column).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _part(tensors, chunks, chunk, CHUNK: tl.constexpr):
    """Return the row of a chunk's tensor, the chunk's offset in it, and the number of entries from there on."""
    row = tl.load(chunks + 2 * chunk)
    begin = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * CHUNK
    length = tl.minimum(tl.load(tensors + row * COLUMNS + SIZE) - begin, CHUNK).to(tl.int32)
    return row, begin, length


@triton.jit(do_not_specialize=["first"])
def _squares(tensors, chunks, partials, first, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    chunk = first + tl.program_id(0)
    row, begin, length = _part(tensors, chunks, chunk, CHUNK)
    grad = _address(tensors, row, GRAD, DTYPE, ALIGNED) + begin
    at = tl.arange(0, CHUNK)
    if length == CHUNK:  # loads without a mask are as wide as possible
        g = tl.load(grad + at).to(tl.float32)
    else:
        g = tl.load(grad + at, mask=at < length, other=0).to(tl.float32)
    tl.store(partials + chunk, tl.sum(g * g))


@triton.jit(do_not_specialize=["tensor_count", "chunk_count"])
def _settle(
    tensors,
    settings,
    addresses,
    partials,
    rates,
    clip,
    norm,
    found_inf,
    grad_scale,
    max_norm,
    tensor_count,
    chunk_count,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute the norm, the factor of gradients, and each tensor's numbers for this update."""
    sums = tl.zeros([BLOCK], tl.float64)
    offset = 0
    while offset < chunk_count:  # no range: in the interpreter its end would be an array
        at = offset + tl.arange(0, BLOCK)
        sums += tl.load(partials + at, mask=at < chunk_count, other=0).to(tl.float64)
        offset += BLOCK
    scale = 1.0
    if grad_scale is not None:
        scale = 1 / tl.load(grad_scale).to(tl.float32)
    total = tl.sqrt(tl.sum(sums)).to(tl.float32) * scale
    tl.store(norm, total)
    coefficient = max_norm / (total + 1e-6)
    # where, not minimum, keeps NaN; without max_norm nothing is clipped
    coefficient = tl.where((coefficient > 1) | (max_norm < 0), 1.0, coefficient)
    tl.store(clip, coefficient * scale)
    skip = 0.0
    if found_inf is not None:
        skip = tl.load(found_inf).to(tl.float32)
    tl.store(clip + 1, skip)

    offset = 0
    while offset < tensor_count:
        at = offset + tl.arange(0, ROWS)
        inside = at < tensor_count
        row = tensors + at * COLUMNS
        step_at = tl.load(row + STEP, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        step = (tl.load(step_at, mask=inside, other=0) + 1).to(tl.float64)
        group = tl.load(row + GROUP, mask=inside, other=0) * COLUMNS
        own = settings + group
        lr_at = tl.load(addresses + group + LR_AT, mask=inside, other=0)
        lr = tl.load(own + LR, mask=inside, other=0)
        lr_there = tl.load(lr_at.to(tl.pointer_type(tl.float32)), mask=inside & (lr_at != 0), other=0)
        lr = tl.where(lr_at != 0, lr_there.to(tl.float64), lr)
        beta1 = tl.load(own + BETA1, mask=inside, other=0.5)
        beta2 = tl.load(own + BETA2, mask=inside, other=0.5)
        decay = tl.load(own + DECAY, mask=inside, other=0)
        eps = tl.load(own + EPS, mask=inside, other=0)
        rate = rates + at * COLUMNS
        tl.store(rate, (lr / (1 - tl.exp(step * tl.log(beta1)))).to(tl.float32), mask=inside)
        tl.store(rate + 1, tl.sqrt(1 - tl.exp(step * tl.log(beta2))).to(tl.float32), mask=inside)
        tl.store(rate + 2, (1 - lr * decay).to(tl.float32), mask=inside)
        tl.store(rate + 3, beta1.to(tl.float32), mask=inside)
        tl.store(rate + 4, (1 - beta1).to(tl.float32), mask=inside)
        tl.store(rate + 5, beta2.to(tl.float32), mask=inside)
        tl.store(rate + 6, (1 - beta2).to(tl.float32), mask=inside)
        tl.store(rate + 7, eps.to(tl.float32), mask=inside)
        offset += ROWS

    tl.debug_barrier()  # rows may share a counter: all must read it before one increments it
    offset = 0
    while offset < tensor_count:
        at = offset + tl.arange(0, ROWS)
        row = tensors + at * COLUMNS
        counts = tl.load(row + COUNTS, mask=at < tensor_count, other=0) != 0
        step_at = tl.load(row + STEP, mask=counts, other=0).to(tl.pointer_type(tl.float32))
        tl.store(step_at, tl.load(step_at, mask=counts, other=0) + (1 - skip), mask=counts)
        offset += ROWS


@triton.jit
def _advance(param, grad, exp_avg, exp_avg_sq, at, inside, coefficient, sizes, betas, eps):
    """Compute AdamW for one block, in float32."""
    step_size, correction, keep = sizes
    beta1, rest1, beta2, rest2 = betas
    g = tl.load(grad + at, mask=inside).to(tl.float32) * coefficient
    p = tl.load(param + at, mask=inside).to(tl.float32) * keep
    m = tl.load(exp_avg + at, mask=inside).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside).to(tl.float32)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p -= tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), correction) + eps)
    tl.store(param + at, p, mask=inside)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)


@triton.jit(do_not_specialize=["first"])
def _update(
    tensors,
    chunks,
    rates,
    clip,
    first,
    PARAM_TYPE: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    STATE_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # in reverse: the last reads of the norm are still in the cache
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    row, begin, length = _part(tensors, chunks, first + part // (CHUNK // BLOCK), CHUNK)
    offset = part % (CHUNK // BLOCK) * BLOCK
    if (offset < length) & (tl.load(clip + 1) != 1):
        param = _address(tensors, row, PARAM, PARAM_TYPE, ALIGNED) + begin
        grad = _address(tensors, row, GRAD, GRAD_TYPE, ALIGNED) + begin
        exp_avg = _address(tensors, row, EXP_AVG, STATE_TYPE, ALIGNED) + begin
        exp_avg_sq = _address(tensors, row, EXP_AVG_SQ, STATE_TYPE, ALIGNED) + begin
        # loaded before the entries, so that nothing waits for them later
        rate = rates + row * COLUMNS
        sizes = (tl.load(rate), tl.load(rate + 1), tl.load(rate + 2))
        betas = (tl.load(rate + 3), tl.load(rate + 4), tl.load(rate + 5), tl.load(rate + 6))
        eps = tl.load(rate + 7)
        coefficient = tl.load(clip)
        at = offset + tl.arange(0, BLOCK)
        if offset + BLOCK <= length:  # loads and stores without a mask are as wide as possible
            _advance(param, grad, exp_avg, exp_avg_sq, at, None, coefficient, sizes, betas, eps)
        else:
            _advance(param, grad, exp_avg, exp_avg_sq, at, at < length, coefficient, sizes, betas, eps)


def run(
    plan: ClipPlan,
    settings: Sequence[tuple[Any, ...]],
    max_norm: float | None,
    found_inf: Tensor | None = None,
    grad_scale: Tensor | None = None,
) -> Tensor:
    """Update the tensors of a plan once, with (lr, beta1, beta2, eps, weight_decay) per group; return the norm of their
    gradients."""
    norm = torch.empty((), dtype=torch.float32, device=plan.device)
    with device_of(norm):
        tensors, chunks, groups = plan.tables(settings)
        for kind, first, count in plan.launches:
            _squares[(count,)](tensors, chunks, plan.partials, first, TYPES[kind.grad], kind.aligned, **SQUARES)
        limit = -1.0 if max_norm is None else float(max_norm)
        _settle[(1,)](
            *(tensors, groups.view(torch.float64), groups, plan.partials, plan.rates, plan.clip, norm),
            *(found_inf, grad_scale, limit, plan.tensor_count, plan.chunk_count),
            **SETTLE,
        )
        for kind, first, count in plan.launches:
            types = (TYPES[kind.param], TYPES[kind.grad], TYPES[kind.state])
            parts = count * (UPDATE["CHUNK"] // UPDATE["BLOCK"])
            _update[(parts,)](tensors, chunks, plan.rates, plan.clip, first, *types, kind.aligned, **UPDATE)
    return norm
