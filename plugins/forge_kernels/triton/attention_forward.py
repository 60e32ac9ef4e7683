"""Attention, forward: one pass over the keys for each block of queries, with an online softmax in base 2."""

from __future__ import annotations

import triton
import triton.language as tl

from forge_kernels.triton.attention_tiles import place, tile


@triton.jit
def forward(
    q, k, v, out, lse, scale, blocks, heads, group, section, T, padded,
    CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, batch, head, at = place(blocks, heads, section, CAUSAL)
    row = block * M
    limits = tl.full([M], 0, tl.int32) + T  # each row sees the columns below its limit
    end = T
    free = T // N * N  # up to here every row sees every column
    if CAUSAL:
        limits = tl.minimum(T, row + 1 + tl.arange(0, M))
        end = tl.minimum(T, row + M)
        free = tl.minimum(free, (row + 1) // N * N)
    rows = tile(q, batch, head, row, M, D)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for column in range(0, end, N):
        scores = tl.dot(rows, tile(k, batch, head // group, column, N, D).T, input_precision="tf32x3")
        if column >= free:
            scores = tl.where(column + tl.arange(0, N)[None, :] < limits[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        p = tl.math.exp2(scores * scale - higher[:, None])
        shrink = tl.math.exp2(peak - higher)
        total = total * shrink + tl.sum(p, 1)
        values = tile(v, batch, head // group, column, N, D)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="tf32x3")
        peak = higher
    tl.store(lse + at.to(tl.int64) * padded + row + tl.arange(0, M), peak + tl.math.log2(total))
    acc = acc * (1 / total)[:, None]
    out.store([batch, head, row, 0], acc.to(out.dtype).reshape(1, 1, M, D))
