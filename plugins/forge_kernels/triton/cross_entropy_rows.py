"""The losses of rows of logits and their gradient in one pass.

The gradient needs the sum over the whole row before its first entry can be written, and a row of a large vocabulary
fits neither the registers nor the shared memory of a program that leaves room for others. So a row is **split over
several programs**: each holds its columns in registers, publishes their maximum and sum in one 64-bit word, waits for
the words of the others, and writes its part. Every logit is read once and every gradient is written once.

CUDA does not guarantee that the programs of a row run at the same time: the device may be small, or shared. So a
program stops waiting after a while, marks its part as late and ends. A second launch writes the late parts from the
same words, with the same bits; usually none are late, and it takes a few microseconds.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge_kernels.contract import INTERPRETED
from forge_kernels.triton.rows import exp, log

PATIENCE = 0 if INTERPRETED else 1024
"""How often a program polls for the words of the others, about a microsecond each, before it marks its part as late. In
Triton's interpreter programs run one after another, so waiting is useless."""

NVIDIA = torch.version.hip is None
FEW_REGISTERS = {"maxnreg": 64} if NVIDIA else {}
WARP = 32 if NVIDIA else 64


class RowSplit(NamedTuple):
    """A split of a row among `parts` programs, each holding `pieces` blocks of `block` columns."""

    parts: int
    pieces: int
    block: int
    warps: int


def split(columns: int, itemsize: int) -> RowSplit:
    # a thread can hold 9 loads of 16 bytes in 64 registers: 1024 threads then keep 147 KB on a multiprocessor
    lane = 16 // itemsize
    block = min(triton.next_power_of_2(columns), 128 * lane)
    pieces = triton.cdiv(columns, block)
    parts = triton.cdiv(pieces, 9)
    return RowSplit(parts, triton.cdiv(pieces, parts), block, warps=max(1, block // (32 * lane)))


def losses_with_gradient(
    logits: Tensor, gradient: Tensor, target: Tensor, scale: Tensor, ignore: int, smoothing: float
) -> Tensor:
    """Return the losses of the rows; write their gradient times scale to `gradient`, which may be `logits`."""
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return losses
    parts, pieces, block, warps = split(columns, logits.element_size())
    # the number of late parts, then the words
    words = torch.zeros(1 + (2 if smoothing else 1) * rows * parts, dtype=torch.int64, device=logits.device)
    late = torch.empty(rows * parts if parts > 1 else 0, dtype=torch.int32, device=logits.device)
    tensors = (logits, gradient, target, losses, words, late, scale)
    numbers = (rows, columns, logits.stride(0), gradient.stride(0), ignore, smoothing)
    options = {
        "SMOOTH": smoothing != 0,
        "PACKED": logits.element_size() == 2 and block == 1024 and _has_packed_maximum(logits.device),
        "PATIENCE": PATIENCE,
        "PARTS": parts,
        "PARTS_PADDED": warps * WARP,  # one word per thread: see _await
        "PIECES": pieces,
        "BLOCK": block,
        "num_warps": warps,
    }
    _rows[(rows * parts,)](*tensors, *numbers, LATE=False, **options, **FEW_REGISTERS)
    if parts > 1:
        _rows[(min(rows * parts, 512),)](*tensors, *numbers, LATE=True, **options)
    return losses


@cache
def _has_packed_maximum(device: torch.device) -> bool:
    return NVIDIA and not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 0)


# -- the columns that a program holds in registers, in pieces of BLOCK columns ----------------------------------------


@triton.jit
def _load_pieces(logits, column, columns, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    xs = ()
    for i in tl.static_range(PIECES):
        at = column + i * BLOCK
        x = tl.load(logits + at, mask=at < columns, other=float("-inf"))
        xs = xs + (x,)  # noqa: RUF005 - Triton has no unpacking
    return xs


@triton.jit
def _higher(a, b, PACKED: tl.constexpr):
    if PACKED:  # two bfloat16 at a time
        high = tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], a.dtype, is_pure=True, pack=2)
    else:
        high = tl.maximum(a.to(tl.float32), b.to(tl.float32))
    return high


@triton.jit
def _again(x, total, PACKED: tl.constexpr):
    """Return x in a way that the compiler cannot see through: it would keep x as float32, in twice the registers."""
    if PACKED:
        zero = tl.zeros(x.shape, tl.int16) + (total < 0).to(tl.int16)  # a sum of exponentials is never negative
        x = tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, zero], x.dtype, is_pure=True, pack=2)
    return x


@triton.jit
def _sum_exponentials(xs, PACKED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the maximum, the base subtracted before the exponential, and Σ exp(x - base)."""
    high = xs[0]
    for i in tl.static_range(1, PIECES):
        high = _higher(high, xs[i], PACKED)
    top = tl.max(high.to(tl.float32), 0)
    base = tl.where(top == float("-inf"), 0.0, top)  # if all are -inf the sum is 0, not NaN: other parts may be finite
    sums = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(PIECES):
        sums += exp(xs[i].to(tl.float32) - base)
    return top, base, tl.sum(sums, 0)


@triton.jit
def _sum_below(xs, base, total, column, columns, PACKED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Return Σ (base - x), for label smoothing."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(PIECES):
        x = _again(xs[i], total, PACKED).to(tl.float32)
        sums += tl.where(column + i * BLOCK < columns, base - x, 0.0)
    return tl.sum(sums, 0)


# -- what the programs of a row tell each other: two floats in one 64-bit word per program ----------------------------


@triton.jit
def _pack(high, low):
    return (high.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (
        low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    )


@triton.jit
def _await(words, inside, PATIENCE: tl.constexpr):
    """Return both floats of each word once none is 0, or after PATIENCE polls, and whether none is 0. No part publishes
    a 0: its sum is at least 1, or its maximum is not finite.

    The number of entries must equal the number of threads. Then one thread reads each word, and a reduction distributes
    it over the program: if several warps loaded it, some could see it and others not, and they would diverge.
    """
    got = tl.load(words, mask=inside, other=1, volatile=True)
    there = tl.min((got != 0).to(tl.int32), 0)
    looks = 0
    while (there == 0) & (looks < PATIENCE):
        got = tl.load(words, mask=inside, other=1, volatile=True)
        there = tl.min((got != 0).to(tl.int32), 0)
        looks += 1
    return (got >> 32).to(tl.int32).to(tl.float32, bitcast=True), got.to(tl.int32).to(tl.float32, bitcast=True), there


# -- one part of one row ----------------------------------------------------------------------------------------------


@triton.jit
def _part(
    program, tensors, numbers,
    LATE: tl.constexpr, SMOOTH: tl.constexpr, PACKED: tl.constexpr, PATIENCE: tl.constexpr,
    PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one part of one row, and the row's loss.

    `gradient` may be `logits`: a part writes only columns that it alone reads, after it has all words of its row.
    """
    logits, gradient, target, losses, words, late, scale = tensors
    rows, columns, stride, gradient_stride, ignore, smoothing = numbers
    row = (program // PARTS).to(tl.int64)
    part = program % PARTS
    first = part * (PIECES * BLOCK)
    column = first + tl.arange(0, BLOCK)
    logits += row * stride
    gradient += row * gradient_stride
    label = tl.load(target + row)
    if label == ignore:
        for i in tl.static_range(PIECES):
            at = column + i * BLOCK
            tl.store(gradient + at, tl.zeros((BLOCK,), gradient.dtype.element_ty), mask=at < columns)
        if part == 0:
            tl.store(losses + row, 0.0)
    else:
        xs = _load_pieces(logits, column, columns, PIECES, BLOCK)
        known = (label >= 0) & (label < columns)
        mine = (label >= first) & (label < first + PIECES * BLOCK) & known
        x_label = tl.load(logits + label, mask=mine, other=0).to(tl.float32)

        below = 0.0
        if LATE:
            tl.debug_barrier()  # every thread must read the label's logit before any thread overwrites it
        else:
            top, base, total = _sum_exponentials(xs, PACKED, PIECES, BLOCK)
            if SMOOTH:
                below = _sum_below(xs, base, total, column, columns, PACKED, PIECES, BLOCK)

        together = 1
        if PARTS > 1:
            k = tl.arange(0, PARTS_PADDED)
            inside = k < PARTS
            ours = words + 1 + row * PARTS
            more = words + 1 + (rows + row) * PARTS
            if not LATE:
                tl.atomic_xchg(ours + part, _pack(top, total), sem="relaxed")
                if SMOOTH:
                    tl.atomic_xchg(more + part, _pack(top * 0 + 1, below), sem="relaxed")
            tops, totals, together = _await(ours + k, inside, PATIENCE)
            tops = tl.where(inside, tops, float("-inf"))
            top = tl.max(tops, 0)
            total = tl.sum(tl.where(inside, totals, 0.0) * exp(tops - top), 0)
            if SMOOTH:  # part k has PIECES · BLOCK columns or the rest
                _, belows, also = _await(more + k, inside, PATIENCE)
                together &= also
                bases = tl.where(tops == float("-inf"), 0.0, tops)
                width = tl.minimum(PIECES * BLOCK, columns - k * PIECES * BLOCK)
                below = tl.sum(tl.where(inside, belows + width * (top - bases), 0.0), 0)

        if together == 1:
            log_total = log(total)
            times = tl.where(known, tl.load(scale), float("nan"))
            slope = times / total
            even = times * smoothing / columns
            for i in tl.static_range(PIECES):  # of all classes but the label
                at = column + i * BLOCK
                d = exp(_again(xs[i], total, PACKED).to(tl.float32) - top) * slope
                if SMOOTH:
                    d -= even
                tl.store(gradient + at, d.to(gradient.dtype.element_ty), mask=at < columns)
            if mine:
                tl.debug_barrier()  # another thread may have written the label's entry above, without its -1
                d_label = exp(x_label - top) * slope - even - times * (1 - smoothing)
                tl.store(gradient + label, d_label.to(gradient.dtype.element_ty))
                loss = log_total + (top - x_label)
                if SMOOTH:
                    loss = (1 - smoothing) * loss + smoothing * (log_total + below / columns)
                tl.store(losses + row, loss)
            if (part == 0) & (known == 0):
                tl.store(losses + row, float("nan"))
        else:
            tl.store(late + tl.atomic_add(words, 1, sem="relaxed"), program)


@triton.jit
def _rows(
    logits, gradient, target, losses, words, late, scale,
    rows, columns, stride, gradient_stride, ignore, smoothing,
    LATE: tl.constexpr, SMOOTH: tl.constexpr, PACKED: tl.constexpr, PATIENCE: tl.constexpr,
    PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run every part of every row in a program of its own; or only the late parts, whose words are complete by then."""
    tensors = (logits, gradient, target, losses, words, late, scale)
    numbers = (rows, columns, stride, gradient_stride, ignore, smoothing)
    if LATE:
        for i in range(tl.program_id(0), tl.load(words).to(tl.int32), tl.num_programs(0)):
            _part(
                tl.load(late + i), tensors, numbers,
                LATE, SMOOTH, PACKED, PATIENCE, PARTS, PARTS_PADDED, PIECES, BLOCK,
            )  # fmt: skip
    else:
        _part(
            tl.program_id(0), tensors, numbers,
            LATE, SMOOTH, PACKED, PATIENCE, PARTS, PARTS_PADDED, PIECES, BLOCK,
        )  # fmt: skip
