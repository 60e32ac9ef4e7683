"""The kernel for losses of rows of logits and their gradient in one pass.

The gradient needs the sum over the whole row before its first entry can be written, and a row of a large vocabulary
fits neither the registers nor the shared memory of a program that leaves room for others. So a row is **split over
several programs**: each holds its columns in registers, publishes their maximum and sum in one 64-bit word, waits for
the words of the others, and writes its part. Every logit is read once and every gradient is written once.

CUDA does not guarantee that the programs of a row run at the same time: the device may be small, or shared. So a
program stops waiting after a while, marks its part as late and ends. A second launch writes the late parts from the
same words, with the same bits; usually none are late, and it takes a few microseconds.
"""

# A type checker cannot read Triton's language.
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from forge_kernels.triton.base2 import exp, log
from forge_kernels.triton.cross_entropy_pieces import (
    load_pieces,
    store_gradient,
    store_zeros,
    sum_below,
    sum_exponentials,
)
from forge_kernels.triton.cross_entropy_words import join_below, join_exponentials, pack


@triton.jit
def _row_loss(top, total, below, x, columns, smoothing, z_loss, SMOOTH: tl.constexpr):
    """Return the loss of a row from its maximum, Σ exp(x - top), Σ (top - x) and the logit of its target."""
    log_total = log(total)
    loss = log_total + (top - x)
    if SMOOTH:
        loss = (1 - smoothing) * loss + smoothing * (log_total + below / columns)
    lse = top + log_total
    return loss + z_loss * lse * lse, lse


@triton.jit
def _part(
    program, tensors, numbers,
    LATE: tl.constexpr, GRADIENT: tl.constexpr, SMOOTH: tl.constexpr, PACKED: tl.constexpr, PATIENCE: tl.constexpr,
    PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one part of one row: its loss, and either its gradient times scale, or maximum and sum for `backward`.

    `gradient` may be `logits`: a part writes only columns that it alone reads, after it has all words of its row.
    """
    logits, gradient, target, losses, tops, totals, words, late, scale = tensors
    rows, columns, stride, gradient_stride, ignore, smoothing, z_loss = numbers
    row = (program // PARTS).to(tl.int64)
    part = program % PARTS
    first = part * (PIECES * BLOCK)
    column = first + tl.arange(0, BLOCK)
    logits += row * stride
    gradient += row * gradient_stride
    label = tl.load(target + row)
    if label == ignore:
        if GRADIENT:
            store_zeros(gradient, column, columns, PIECES, BLOCK)
        if part == 0:
            tl.store(losses + row, 0.0)
    else:
        xs = load_pieces(logits, column, columns, PIECES, BLOCK)
        known = (label >= 0) & (label < columns)
        mine = (label >= first) & (label < first + PIECES * BLOCK) & known
        x_label = tl.load(logits + label, mask=mine, other=0).to(tl.float32)

        below = 0.0
        if LATE:
            tl.debug_barrier()  # every thread must read the label's logit before any thread overwrites it
        else:
            top, base, total = sum_exponentials(xs, PACKED, PIECES, BLOCK)
            if SMOOTH:
                below = sum_below(xs, base, total, column, columns, PACKED, PIECES, BLOCK)

        together = 1
        if PARTS > 1:
            k = tl.arange(0, PARTS_PADDED)
            inside = k < PARTS
            ours = words + 1 + row * PARTS
            more = words + 1 + (rows + row) * PARTS
            if not LATE:
                tl.atomic_xchg(ours + part, pack(top, total), sem="relaxed")
                if SMOOTH:
                    tl.atomic_xchg(more + part, pack(top * 0 + 1, below), sem="relaxed")
            top, total, all_tops, together = join_exponentials(ours + k, inside, PATIENCE)
            if SMOOTH:
                below, together = join_below(
                    more + k, inside, together, k, top, all_tops, columns, PATIENCE, PIECES, BLOCK
                )

        if together == 1:
            loss, lse = _row_loss(top, total, below, x_label, columns, smoothing, z_loss, SMOOTH)
            if GRADIENT:
                times = tl.where(known, tl.load(scale), float("nan"))
                slope = times * (1 + 2 * z_loss * lse) / total
                even = times * smoothing / columns
                store_gradient(gradient, xs, top, total, slope, even, column, columns, SMOOTH, PACKED, PIECES, BLOCK)
                if mine:
                    tl.debug_barrier()  # another thread may have written the label's entry above, without its -1
                    d_label = exp(x_label - top) * slope - even - times * (1 - smoothing)
                    tl.store(gradient + label, d_label.to(gradient.dtype.element_ty))
            elif part == 0:
                tl.store(tops + row, top)
                tl.store(totals + row, total)
            if mine:
                tl.store(losses + row, loss)
            if (part == 0) & (known == 0):
                tl.store(losses + row, float("nan"))
        else:
            tl.store(late + tl.atomic_add(words, 1, sem="relaxed"), program)


@triton.jit
def split_rows(
    logits, gradient, target, losses, tops, totals, words, late, scale,
    rows, columns, stride, gradient_stride, ignore, smoothing, z_loss,
    LATE: tl.constexpr, GRADIENT: tl.constexpr, SMOOTH: tl.constexpr, PACKED: tl.constexpr, PATIENCE: tl.constexpr,
    PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run every part of every row in a program of its own; or only the late parts, whose words are complete by then."""
    if LATE:
        for i in range(tl.program_id(0), tl.load(words).to(tl.int32), tl.num_programs(0)):
            _part(
                tl.load(late + i),
                (logits, gradient, target, losses, tops, totals, words, late, scale),
                (rows, columns, stride, gradient_stride, ignore, smoothing, z_loss),
                LATE, GRADIENT, SMOOTH, PACKED, PATIENCE, PARTS, PARTS_PADDED, PIECES, BLOCK,
            )  # fmt: skip
    else:
        _part(
            tl.program_id(0),
            (logits, gradient, target, losses, tops, totals, words, late, scale),
            (rows, columns, stride, gradient_stride, ignore, smoothing, z_loss),
            LATE, GRADIENT, SMOOTH, PACKED, PATIENCE, PARTS, PARTS_PADDED, PIECES, BLOCK,
        )  # fmt: skip
