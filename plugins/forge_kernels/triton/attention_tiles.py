"""Shared parts of the attention kernels: assignment of tiles to programs, and tensor descriptors.

Tensor descriptors (TMA) read zeros and write nothing beyond the edges. So lengths and head sizes that are not multiples
of a tile need no masks except the one on the scores.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def place(blocks, heads, section, LONGEST_LAST: tl.constexpr):
    """Return block, batch and head of this program, and the index of the head over the whole batch.

    Programs that run at the same time share a section of a few heads, whose keys and values stay in the L2 cache;
    within a section the blocks with the most work start first.
    """
    pid = tl.program_id(0)
    inside = pid % (blocks * section)
    block = inside // section
    if LONGEST_LAST:
        block = blocks - 1 - block
    at = pid // (blocks * section) * section + inside % section
    return block, at // heads, at % heads, at


@triton.jit
def tile(descriptor, batch, head, row, ROWS: tl.constexpr, D: tl.constexpr):
    """Load the rows of one head from `row` on, as a matrix."""
    return descriptor.load([batch, head, row, 0]).reshape(ROWS, D)


def descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Describe x (batch, heads, length, size) in tiles of rows of one head; `width` is size padded to a power of 2."""
    (b, h, length, d), (sb, sh, step, _) = x.shape, x.stride()
    strides = [sb if b > 1 else 16, sh if h > 1 else 16, step if length > 1 else 16, 1]  # any stride for size 1
    return TensorDescriptor(x, [b, h, length, d], strides, [1, 1, rows, width])


def movable(x: Tensor) -> Tensor:
    """Return x if a descriptor can describe it, else a copy."""
    unit = 16 // x.itemsize
    for n, step in zip(x.shape[:3], x.stride()[:3], strict=True):
        if n > 1 and (step <= 0 or step % unit):
            return x.clone(memory_format=torch.contiguous_format)
    fits = x.stride(3) == 1 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def section(heads: int) -> int:
    """Return how many heads run at the same time: a divisor of all heads."""
    return gcd(heads, 8)
