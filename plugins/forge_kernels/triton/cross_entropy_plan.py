"""The split of a row of logits among programs."""

from __future__ import annotations

from typing import NamedTuple

import triton


class RowSplit(NamedTuple):
    """A split of a row among `parts` programs, each holding `pieces` blocks of `block` columns."""

    parts: int
    pieces: int
    block: int
    warps: int


def plan(columns: int, itemsize: int) -> RowSplit:
    # a thread can hold 9 loads of 16 bytes in 64 registers: 1024 threads then keep 147 KB on a multiprocessor
    lane = 16 // itemsize
    block = min(triton.next_power_of_2(columns), 128 * lane)
    pieces = triton.cdiv(columns, block)
    parts = triton.cdiv(pieces, 9)
    return RowSplit(parts, triton.cdiv(pieces, parts), block, warps=max(1, block // (32 * lane)))
