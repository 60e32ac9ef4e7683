"""Exchange of partial sums among the programs of a row: two floats in one 64-bit word per program."""

# A type checker cannot read Triton's language.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from forge_kernels.triton.base2 import exp


@triton.jit
def pack(high, low):
    return (high.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (
        low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    )


@triton.jit
def _unpack(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _await(words, inside, PATIENCE: tl.constexpr):
    """Return the words once none is 0, or after PATIENCE polls, and whether none is 0. No part publishes a 0: its sum
    is at least 1, or its maximum is not finite.

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
    return got, there


@triton.jit
def join_exponentials(words, inside, PATIENCE: tl.constexpr):
    """Return the row's maximum, its Σ exp(x - maximum), the maximum of every part, and whether all words are there."""
    got, there = _await(words, inside, PATIENCE)
    tops, totals = _unpack(got)
    tops = tl.where(inside, tops, float("-inf"))
    totals = tl.where(inside, totals, 0.0)
    top = tl.max(tops, 0)
    return top, tl.sum(totals * exp(tops - top), 0), tops, there


@triton.jit
def join_below(
    words, inside, there, k, top, tops, columns, PATIENCE: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return Σ (top - x) of the row, of which part k has PIECES · BLOCK columns or the rest, and whether these words
    are all `there` too."""
    got, also = _await(words, inside, PATIENCE)
    there &= also
    _, below = _unpack(got)
    bases = tl.where(tops == float("-inf"), 0.0, tops)
    width = tl.minimum(PIECES * BLOCK, columns - k * PIECES * BLOCK)
    return tl.sum(tl.where(inside, below + width * (top - bases), 0.0), 0), there
