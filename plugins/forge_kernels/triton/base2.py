"""Exponential and logarithm in base 2, the device's own instructions."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def log(x):
    return tl.log2(x) * LN2
