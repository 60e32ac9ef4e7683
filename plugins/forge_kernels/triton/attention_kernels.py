"""The kernels of attention.

Forward: one pass over the keys for each block of queries, with an online softmax in base 2. Backward: one kernel for
the queries' gradient, then one for the keys' and values'; both recompute the probabilities from the saved logsumexp.
Neither uses atomics, so results are bit for bit the same in every run; the second sums over the heads that share keys,
so no expanded gradient is stored.

Tensor descriptors (TMA) read zeros and write nothing beyond the edges. So lengths and head sizes that are not multiples
of a tile need no masks except the one on the scores.
"""

from __future__ import annotations

import triton
import triton.language as tl


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


@triton.jit
def limits_of(row, T, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return for a block of M queries: the column below which each row sees, the end of all columns, and the column up
    to which every row sees every column."""
    limits = tl.full([M], 0, tl.int32) + T
    end = T
    free = T // N * N
    if CAUSAL:
        limits = tl.minimum(T, row + 1 + tl.arange(0, M))
        end = tl.minimum(T, row + M)
        free = tl.minimum(free, (row + 1) // N * N)
    return limits, end, free


@triton.jit
def forward(
    q, k, v, out, lse, scale, blocks, heads, group, section, T, padded,
    CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, batch, head, at = place(blocks, heads, section, CAUSAL)
    row = block * M
    limits, end, free = limits_of(row, T, CAUSAL, M, N)
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


@triton.jit
def queries(
    q, k, v, out, do, dq, lse, delta, scale, factor, blocks, heads, group, section, T, padded,
    CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute dq of one block of queries, and delta, the sums over out · do, which the other kernel reads."""
    block, batch, head, at = place(blocks, heads, section, CAUSAL)
    row = block * M
    limits, end, free = limits_of(row, T, CAUSAL, M, N)
    d_out = tile(do, batch, head, row, M, D)
    sums = tl.sum(tile(out, batch, head, row, M, D).to(tl.float32) * d_out.to(tl.float32), 1)
    statistics = at.to(tl.int64) * padded + row + tl.arange(0, M)
    tl.store(delta + statistics, sums)
    log = tl.load(lse + statistics)
    rows = tile(q, batch, head, row, M, D)
    acc = tl.zeros([M, D], tl.float32)
    for column in range(0, end, N):
        keys = tile(k, batch, head // group, column, N, D)
        scores = tl.dot(rows, keys.T, input_precision="tf32x3")
        dp = tl.dot(d_out, tile(v, batch, head // group, column, N, D).T, input_precision="tf32x3")
        p = tl.math.exp2(scores * scale - log[:, None])
        if column >= free:
            p = tl.where(column + tl.arange(0, N)[None, :] < limits[:, None], p, 0.0)
        ds = p * (dp - sums[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision="tf32x3")
    dq.store([batch, head, row, 0], (acc * factor).to(dq.dtype).reshape(1, 1, M, D))


@triton.jit
def keys_and_values(
    q, k, v, do, dk, dv, lse, delta, scale, factor, blocks, heads, group, section, S, padded,
    CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one block of keys, over all queries of all heads that share it. `heads` counts key heads."""
    block, batch, head, at = place(blocks, heads, section, False)
    column = block * N
    keys = tile(k, batch, head, column, N, D)
    values = tile(v, batch, head, column, N, D)
    d_keys = tl.zeros([N, D], tl.float32)
    d_values = tl.zeros([N, D], tl.float32)
    first = 0
    if CAUSAL:
        first = column // M * M
    for member in range(group):
        statistics = (at * group + member).to(tl.int64) * padded
        for row in range(first, S, M):
            rows = tile(q, batch, head * group + member, row, M, D)
            log = tl.load(lse + statistics + row + tl.arange(0, M))
            scores = tl.dot(keys, rows.T, input_precision="tf32x3")  # transposed: keys by queries
            p = tl.math.exp2(scores * scale - log[None, :])
            if CAUSAL:
                p = tl.where(row + tl.arange(0, M)[None, :] >= column + tl.arange(0, N)[:, None], p, 0.0)
            d_out = tile(do, batch, head * group + member, row, M, D)
            dp = tl.dot(values, d_out.T, input_precision="tf32x3")
            d_values = tl.dot(p.to(d_out.dtype), d_out, d_values, input_precision="tf32x3")
            # loaded late: three programs share a multiprocessor only with at most 168 registers per thread
            sums = tl.load(delta + statistics + row + tl.arange(0, M))
            ds = p * (dp - sums[None, :])
            d_keys = tl.dot(ds.to(rows.dtype), rows, d_keys, input_precision="tf32x3")
    dv.store([batch, head, column, 0], d_values.to(dv.dtype).reshape(1, 1, N, D))
    dk.store([batch, head, column, 0], (d_keys * factor).to(dk.dtype).reshape(1, 1, N, D))
