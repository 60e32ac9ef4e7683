"""Cross-entropy over rows of logits: losses alone, losses with their gradient in one reading, and the gradient later.

The gradient needs the sum over the whole row before its first entry can be written, and a row of a large vocabulary
fits neither the registers nor the shared memory of a program that leaves room for others. So a row is **split over
several programs**: each holds its columns in registers, publishes their maximum and sum in one 64-bit word, waits for
the words of the others, and writes its share. Every logit is read once and every gradient is written once.

CUDA does not promise that the programs of a row run at the same time: the device may be small, or shared. So a program
does not wait for ever: it notes its part as late and ends. A second launch writes the parts that are late, from the
same words and so to the same bit; as a rule there are none, and it takes a few microseconds.
"""

# Triton's language is not Python's to a type checker.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op
from torch.utils._python_dispatch import _get_current_dispatch_mode

from forge.kernels.contract import INTERPRETED, device_of, refuse_second_derivative

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

PATIENCE = 0 if INTERPRETED else 1024
"""How often a program looks for the words of the others, each time for about a microsecond, before it leaves its part
for later. In Triton's interpreter programs run one after another: waiting is in vain there."""

NVIDIA = torch.version.hip is None
FEW_REGISTERS = {"maxnreg": 64} if NVIDIA else {}
WARP = 32 if NVIDIA else 64


class Plan(NamedTuple):
    """How a row is shared out: `parts` programs, each holding `pieces` blocks of `block` columns."""

    parts: int
    pieces: int
    block: int
    warps: int


def plan(columns: int, itemsize: int) -> Plan:
    # 9 loads of 16 bytes are what a thread can hold in 64 registers: 1024 threads then keep 147 KB on a multiprocessor
    lane = 16 // itemsize
    block = min(triton.next_power_of_2(columns), 128 * lane)
    pieces = triton.cdiv(columns, block)
    parts = triton.cdiv(pieces, 9)
    return Plan(parts, triton.cdiv(pieces, parts), block, warps=max(1, block // (32 * lane)))


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _count(target, scale, rows, ignore, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """scale = 1 / (targets that count), or 1."""
    if MEAN:
        counts = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, rows, BLOCK):
            at = start + tl.arange(0, BLOCK)
            counts += (tl.load(target + at, mask=at < rows, other=ignore) != ignore).to(tl.int32)
        tl.store(scale, 1.0 / tl.sum(counts, 0).to(tl.float32))
    else:
        tl.store(scale, 1.0)


@triton.jit
def _total(losses, scale, out, rows, BLOCK: tl.constexpr):
    """out = scale · the sum of losses, always in the same order."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(losses + at, mask=at < rows, other=0.0)
    tl.store(out, tl.sum(sums, 0) * tl.load(scale))


@triton.jit
def _row_loss(top, total, below, x, columns, smoothing, z_loss, SMOOTH: tl.constexpr):
    """The loss of a row from its maximum, Σ exp(x - top), Σ (top - x) and the logit of its target."""
    log_total = tl.log2(total) * LN2
    loss = log_total + (top - x)
    if SMOOTH:
        loss = (1 - smoothing) * loss + smoothing * (log_total + below / columns)
    lse = top + log_total
    return loss + z_loss * lse * lse, lse


@triton.jit
def _pack(high, low):
    return (high.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (
        low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    )


@triton.jit
def _unpack(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _await(words, inside, PATIENCE: tl.constexpr):
    """The words once none is 0, or after so many looks; and whether none is. No part publishes a 0: its sum is at least
    1, or its maximum is not finite.

    There must be as many entries as threads. Then each word is seen by one thread, and all learn of it by a reduction
    over the program: were it loaded by several warps, some could see it and others not, and they would part ways.
    """
    got = tl.load(words, mask=inside, other=1, volatile=True)
    there = tl.min((got != 0).to(tl.int32), 0)
    looks = 0
    while (there == 0) & (looks < PATIENCE):
        got = tl.load(words, mask=inside, other=1, volatile=True)
        there = tl.min((got != 0).to(tl.int32), 0)
        looks += 1
    return got, there


@triton.jit
def _higher(a, b, PACKED: tl.constexpr):
    if PACKED and a.dtype == tl.bfloat16:  # two at a time
        high = tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], a.dtype, is_pure=True, pack=2)
    elif PACKED:
        high = tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], a.dtype, is_pure=True, pack=2)
    else:
        high = tl.maximum(a.to(tl.float32), b.to(tl.float32))
    return high


@triton.jit
def _again(x, total, PACKED: tl.constexpr):
    """x, so that the compiler cannot see that it is: it would keep it as float32 meanwhile, in twice the registers."""
    if PACKED:
        zero = tl.zeros(x.shape, tl.int16) + (total < 0).to(tl.int16)  # a sum of exponentials is never below 0
        x = tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, zero], x.dtype, is_pure=True, pack=2)
    return x


@triton.jit
def _part(
    program,
    tensors,
    numbers,
    LATE: tl.constexpr,
    GRADIENT: tl.constexpr,
    SMOOTH: tl.constexpr,
    PACKED: tl.constexpr,
    PATIENCE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One part of one row: its loss, and either its gradient times scale, or what `_backward` needs.

    `gradient` may be `logits`: a part writes what it alone has read, and nothing before it has all words of its row.
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
            for i in tl.static_range(PIECES):
                at = column + i * BLOCK
                tl.store(gradient + at, tl.zeros((BLOCK,), gradient.dtype.element_ty), mask=at < columns)
        if part == 0:
            tl.store(losses + row, 0.0)
    else:
        xs = ()
        for i in tl.static_range(PIECES):
            at = column + i * BLOCK
            x = tl.load(logits + at, mask=at < columns, other=float("-inf"))
            xs = xs + (x,)  # noqa: RUF005 - Triton has no unpacking
        known = (label >= 0) & (label < columns)
        mine = (label >= first) & (label < first + PIECES * BLOCK) & known
        x_label = tl.load(logits + label, mask=mine, other=0).to(tl.float32)

        below = 0.0
        if LATE:
            tl.debug_barrier()  # every thread has read the label's logit before any writes over it
        else:
            high = xs[0]
            for i in tl.static_range(1, PIECES):
                high = _higher(high, xs[i], PACKED)
            top = tl.max(high.to(tl.float32), 0)
            base = tl.where(top == float("-inf"), 0.0, top)  # all -inf: the sum is 0, not NaN, beside other parts
            sums = tl.zeros((BLOCK,), tl.float32)
            for i in tl.static_range(PIECES):
                sums += tl.exp2((xs[i].to(tl.float32) - base) * LOG2E)
            total = tl.sum(sums, 0)
            if SMOOTH:
                sums = tl.zeros((BLOCK,), tl.float32)
                for i in tl.static_range(PIECES):
                    x = _again(xs[i], total, PACKED).to(tl.float32)
                    sums += tl.where(column + i * BLOCK < columns, base - x, 0.0)
                below = tl.sum(sums, 0)

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
            got, together = _await(ours + k, inside, PATIENCE)
            all_tops, all_totals = _unpack(got)
            all_tops = tl.where(inside, all_tops, float("-inf"))
            all_totals = tl.where(inside, all_totals, 0.0)
            top = tl.max(all_tops, 0)
            total = tl.sum(all_totals * tl.exp2((all_tops - top) * LOG2E), 0)
            if SMOOTH:
                got, also = _await(more + k, inside, PATIENCE)
                together &= also
                _, all_below = _unpack(got)
                bases = tl.where(all_tops == float("-inf"), 0.0, all_tops)
                width = tl.minimum(PIECES * BLOCK, columns - k * PIECES * BLOCK)
                below = tl.sum(tl.where(inside, all_below + width * (top - bases), 0.0), 0)

        if together == 1:
            loss, lse = _row_loss(top, total, below, x_label, columns, smoothing, z_loss, SMOOTH)
            if GRADIENT:
                times = tl.where(known, tl.load(scale), float("nan"))
                slope = times * (1 + 2 * z_loss * lse) / total
                even = times * smoothing / columns
                for i in tl.static_range(PIECES):
                    at = column + i * BLOCK
                    d = tl.exp2((_again(xs[i], total, PACKED).to(tl.float32) - top) * LOG2E) * slope
                    if SMOOTH:
                        d -= even
                    tl.store(gradient + at, d.to(gradient.dtype.element_ty), mask=at < columns)
                if mine:
                    tl.debug_barrier()  # the label's entry was written above without its -1, perhaps by another thread
                    d_label = tl.exp2((x_label - top) * LOG2E) * slope - even - times * (1 - smoothing)
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
def _rows(
    logits,
    gradient,
    target,
    losses,
    tops,
    totals,
    words,
    late,
    scale,
    rows,
    columns,
    stride,
    gradient_stride,
    ignore,
    smoothing,
    z_loss,
    LATE: tl.constexpr,
    GRADIENT: tl.constexpr,
    SMOOTH: tl.constexpr,
    PACKED: tl.constexpr,
    PATIENCE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every part of every row by a program of its own; or those that are late, whose words are all there by then."""
    if LATE:
        for i in range(tl.program_id(0), tl.load(words).to(tl.int32), tl.num_programs(0)):
            _part(
                tl.load(late + i),
                (logits, gradient, target, losses, tops, totals, words, late, scale),
                (rows, columns, stride, gradient_stride, ignore, smoothing, z_loss),
                LATE,
                GRADIENT,
                SMOOTH,
                PACKED,
                PATIENCE,
                PARTS,
                PARTS_PADDED,
                PIECES,
                BLOCK,
            )
    else:
        _part(
            tl.program_id(0),
            (logits, gradient, target, losses, tops, totals, words, late, scale),
            (rows, columns, stride, gradient_stride, ignore, smoothing, z_loss),
            LATE,
            GRADIENT,
            SMOOTH,
            PACKED,
            PATIENCE,
            PARTS,
            PARTS_PADDED,
            PIECES,
            BLOCK,
        )


@triton.jit
def _backward(
    grad,
    grad_stride,
    logits,
    target,
    tops,
    totals,
    scale,
    gradient,
    columns,
    stride,
    ignore,
    smoothing,
    z_loss,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of BLOCK logits of one row, from what `_forward` kept."""
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
        slope = (1 + 2 * z_loss * (top + tl.log2(total) * LN2)) / total
        d = tl.exp2((x - top) * LOG2E) * slope - smoothing / columns - tl.where(at == label, 1 - smoothing, 0.0)
        tl.store(gradient + at, (d * times).to(gradient.dtype.element_ty), mask=at < columns)


@triton.jit
def _scale(values, factor, count, BLOCK: tl.constexpr):
    """values *= factor; nothing is read where the factor is 1."""
    times = tl.load(factor)
    if times != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(values + at, mask=at < count, other=0).to(tl.float32)
            tl.store(values + at, (x * times).to(values.dtype.element_ty), mask=at < count)


# -- launches: also used by linear_cross_entropy ----------------------------------------------------------------------


def count_targets(target: Tensor, ignore: int, mean: bool) -> Tensor:
    """One float on the device: 1 over the number of targets that count, or 1."""
    scale = torch.empty(1, dtype=torch.float32, device=target.device)
    _count[(1,)](target, scale, target.numel(), ignore, mean, BLOCK=4096, num_warps=8)
    return scale


def total_loss(losses: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty((), dtype=torch.float32, device=losses.device)
    _total[(1,)](losses, scale, out, losses.numel(), BLOCK=4096, num_warps=8)
    return out


def losses_with_gradient(
    logits: Tensor, gradient: Tensor, target: Tensor, scale: Tensor, ignore: int, smoothing: float, z_loss: float
) -> Tensor:
    """The losses of the rows; their gradient times scale goes to `gradient`, which may be `logits`."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _launch_rows(logits, gradient, target, losses, None, None, scale, ignore, smoothing, z_loss)
    return losses


def losses_only(
    logits: Tensor, target: Tensor, ignore: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of the rows, with the maximum and Σ exp(x - maximum) of each that counts."""
    losses, tops, totals = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(3))
    _launch_rows(logits, None, target, losses, tops, totals, None, ignore, smoothing, z_loss)
    return losses, tops, totals


def _launch_rows(logits, gradient, target, losses, tops, totals, scale, ignore, smoothing, z_loss) -> None:
    rows, columns = logits.shape
    if rows == 0:
        return
    parts, pieces, block, warps = plan(columns, logits.element_size())
    # the number of parts that are late, then the words
    words = torch.zeros(1 + (2 if smoothing else 1) * rows * parts, dtype=torch.int64, device=logits.device)
    late = torch.empty(rows * parts if parts > 1 else 0, dtype=torch.int32, device=logits.device)
    unused = logits  # a pointer that is never followed
    args = (
        logits,
        unused if gradient is None else gradient,
        target,
        losses,
        unused if tops is None else tops,
        unused if totals is None else totals,
        words,
        late,
        unused if scale is None else scale,
        rows,
        columns,
        logits.stride(0),
        0 if gradient is None else gradient.stride(0),
        ignore,
        smoothing,
        z_loss,
    )
    options = {
        "GRADIENT": gradient is not None,
        "SMOOTH": smoothing != 0,
        "PACKED": logits.element_size() == 2 and block == 1024 and _has_packed_maximum(logits.device),
        "PATIENCE": PATIENCE,
        "PARTS": parts,
        "PARTS_PADDED": warps * WARP,  # one word per thread: see _await
        "PIECES": pieces,
        "BLOCK": block,
        "num_warps": warps,
    }
    _rows[(rows * parts,)](*args, LATE=False, **options, **FEW_REGISTERS)
    if parts > 1:
        _rows[(min(rows * parts, 512),)](*args, LATE=True, **options)


@cache
def _has_packed_maximum(device: torch.device) -> bool:
    return NVIDIA and not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 0)


def row_major(logits: Tensor) -> Tensor:
    """The same rows with neighbouring columns side by side: itself where it is so already."""
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


# -- operators --------------------------------------------------------------------------------------------------------


@custom_op("forge::cross_entropy", mutates_args=())
def cross_entropy(
    logits: Tensor, target: Tensor, ignore: int, smoothing: float, z_loss: float, reduction: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and what its gradient needs: maximum and sum of every row, and the scale."""
    logits, target = row_major(logits), target.contiguous()
    with device_of(logits):
        scale = count_targets(target, ignore, reduction == "mean")
        losses, tops, totals = losses_only(logits, target, ignore, smoothing, z_loss)
        return losses if reduction == "none" else total_loss(losses, scale), tops, totals, scale


@cross_entropy.register_fake
def _(
    logits: Tensor, target: Tensor, ignore: int, smoothing: float, z_loss: float, reduction: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = logits.new_empty(logits.shape[0], dtype=torch.float32)
    loss = torch.empty_like(rows) if reduction == "none" else logits.new_empty((), dtype=torch.float32)
    return loss, rows, torch.empty_like(rows), logits.new_empty(1, dtype=torch.float32)


@custom_op("forge::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    tops: Tensor,
    totals: Tensor,
    scale: Tensor,
    ignore: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    logits, target, grad = row_major(logits), target.contiguous(), grad.contiguous()
    rows, columns = logits.shape
    gradient = torch.empty(rows, columns, dtype=logits.dtype, device=logits.device)
    if rows == 0:
        return gradient
    block = min(4096, triton.next_power_of_2(columns))
    blocks = triton.cdiv(columns, block)
    with device_of(logits):
        _backward[(rows * blocks,)](
            grad,
            grad.dim(),  # one gradient for every row, or one for all
            logits,
            target,
            tops,
            totals,
            scale,
            gradient,
            columns,
            logits.stride(0),
            ignore,
            smoothing,
            z_loss,
            BLOCKS=blocks,
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
        )
    return gradient


@cross_entropy_backward.register_fake
def _(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    tops: Tensor,
    totals: Tensor,
    scale: Tensor,
    ignore: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _keep(ctx, inputs, output) -> None:
    logits, target, *ctx.options, _ = inputs
    _, *rest = output
    ctx.mark_non_differentiable(*rest)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, *rest)


def _differentiate(ctx, grad, *_):
    if grad is None:
        return (None,) * 6
    return cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


cross_entropy.register_autograd(_differentiate, setup_context=_keep)


@custom_op("forge::cross_entropy_with_gradient", mutates_args=("gradient",))
def cross_entropy_with_gradient(
    logits: Tensor, gradient: Tensor, target: Tensor, ignore: int, smoothing: float, z_loss: float, mean: bool
) -> Tensor:
    """The loss; its gradient goes to `gradient`, which may be `logits`. Both have neighbouring columns side by side."""
    target = target.contiguous()
    with device_of(logits):
        scale = count_targets(target, ignore, mean)
        return total_loss(losses_with_gradient(logits, gradient, target, scale, ignore, smoothing, z_loss), scale)


@cross_entropy_with_gradient.register_fake
def _(
    logits: Tensor, gradient: Tensor, target: Tensor, ignore: int, smoothing: float, z_loss: float, mean: bool
) -> Tensor:
    return logits.new_empty((), dtype=torch.float32)


@custom_op("forge::scale_", mutates_args=("values",))
def scale_(values: Tensor, factor: Tensor) -> None:
    """values *= factor, one float on the device; where it is 1, memory is not touched."""
    if values.is_contiguous():
        programs = min(triton.cdiv(values.numel(), 8192), 1024)
        if programs:
            with device_of(values):
                _scale[(programs,)](values, factor, values.numel(), BLOCK=8192, num_warps=8)
    else:
        values.mul_(factor)


def times(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient · factor, for a backward: in place where the graph is used once, so that a factor of 1 costs nothing."""
    traced = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    if traced or torch._C._autograd._get_current_graph_task_keep_graph():
        return gradient * factor
    scale_(gradient, factor)
    return gradient


class CrossEntropy(torch.autograd.Function):
    """The gradient of the logits is there after forward; backward multiplies it by the gradient of the loss."""

    @staticmethod
    def forward(ctx, logits, target, ignore, smoothing, z_loss, mean, in_place):
        values = row_major(logits)
        apart = values.stride(0) >= values.shape[1]  # rows that share memory cannot take a gradient
        gradient = values if apart and (in_place or values is not logits) else torch.empty_like(values.contiguous())
        loss = cross_entropy_with_gradient(values, gradient, target, ignore, smoothing, z_loss, mean)
        ctx.save_for_backward(gradient.detach())
        return loss

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative("cross_entropy")
        (gradient,) = ctx.saved_tensors
        return times(gradient, grads[0]), None, None, None, None, None, None
