"""Operations on the columns of a row that a program holds in registers, in pieces of BLOCK columns."""

# A type checker cannot read Triton's language.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from forge_kernels.triton.base2 import exp


@triton.jit
def load_pieces(logits, column, columns, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    xs = ()
    for i in tl.static_range(PIECES):
        at = column + i * BLOCK
        x = tl.load(logits + at, mask=at < columns, other=float("-inf"))
        xs = xs + (x,)  # noqa: RUF005 - Triton has no unpacking
    return xs


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
    """Return x in a way that the compiler cannot see through: it would keep x as float32, in twice the registers."""
    if PACKED:
        zero = tl.zeros(x.shape, tl.int16) + (total < 0).to(tl.int16)  # a sum of exponentials is never negative
        x = tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, zero], x.dtype, is_pure=True, pack=2)
    return x


@triton.jit
def sum_exponentials(xs, PACKED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
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
def sum_below(
    xs, base, total, column, columns, PACKED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return Σ (base - x), for label smoothing."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(PIECES):
        x = _again(xs[i], total, PACKED).to(tl.float32)
        sums += tl.where(column + i * BLOCK < columns, base - x, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def store_gradient(
    gradient, xs, top, total, slope, even, column, columns,
    SMOOTH: tl.constexpr, PACKED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write slope · exp(x - top) - even: the gradient of all classes but the label."""
    for i in tl.static_range(PIECES):
        at = column + i * BLOCK
        d = exp(_again(xs[i], total, PACKED).to(tl.float32) - top) * slope
        if SMOOTH:
            d -= even
        tl.store(gradient + at, d.to(gradient.dtype.element_ty), mask=at < columns)


@triton.jit
def store_zeros(gradient, column, columns, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    for i in tl.static_range(PIECES):
        at = column + i * BLOCK
        tl.store(gradient + at, tl.zeros((BLOCK,), gradient.dtype.element_ty), mask=at < columns)
