"""How the programs of a row tell each other what they have summed: two floats in one 64-bit word for each."""

# Triton's language is not Python's to a type checker.
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
def join_exponentials(words, inside, PATIENCE: tl.constexpr):
    """The maximum of the row, its Σ exp(x - maximum), the maximum of every part, and whether all words are there."""
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
    """Σ (top - x) of the row, of which part k has PIECES · BLOCK columns or what is left; and whether these words are
    all `there` too."""
    got, also = _await(words, inside, PATIENCE)
    there &= also
    _, below = _unpack(got)
    bases = tl.where(tops == float("-inf"), 0.0, tops)
    width = tl.minimum(PIECES * BLOCK, columns - k * PIECES * BLOCK)
    return tl.sum(tl.where(inside, below + width * (top - bases), 0.0), 0), there
