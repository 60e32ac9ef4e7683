"""Attention operators: launches, tile sizes, and the backward."""

from __future__ import annotations

from math import gcd

import torch
import triton
from torch import Tensor
from torch.library import custom_op
from triton.tools.tensor_descriptor import TensorDescriptor

from forge_kernels.contract import device_of
from forge_kernels.triton.attention_kernels import forward, keys_and_values, queries

LOG2_E = 1.4426950408889634

# (rows of queries, rows of keys, warps, stages) by kernel and head size. Each kernel reads values per query that the
# previous one wrote in whole tiles: the query rows of KEYS divide those of QUERIES, and those divide FORWARD's.
FORWARD = {64: (64, 128, 4, 2), 128: (128, 64, 4, 2), 256: (128, 64, 8, 2)}
QUERIES = {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 2)}
KEYS = {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (32, 64, 8, 2)}
FULL = (32, 32, 4, 1)  # float32: three products of tf32 each


def _tiles(table: dict[int, tuple[int, int, int, int]], x: Tensor) -> tuple[int, int, int, int]:
    if x.dtype == torch.float32:
        return FULL
    size = x.shape[3]
    return table[64 if size <= 64 else 128 if size <= 128 else 256]


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


def _like(q: Tensor) -> Tensor:
    """Make a tensor with the memory order of q's dimensions: heads inside the sequence, or outside."""
    b, h, s, d = q.shape
    if q.stride(1) < q.stride(2):
        return torch.empty((b, s, h, d), dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty((b, h, s, d), dtype=q.dtype, device=q.device)


def _statistics(q: Tensor) -> Tensor:
    """Make a tensor of one number per query, in whole tiles."""
    b, h, s, _ = q.shape
    m = _tiles(FORWARD, q)[0]
    return torch.empty((b, h, (s + m - 1) // m * m), dtype=torch.float32, device=q.device)


@custom_op("forge::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _like(q), _statistics(q)
    if not out.numel() or not k.shape[2]:
        return out.zero_(), lse.zero_()
    q, k, v = movable(q), movable(k), movable(v)
    (b, h, s, d), (_, hk, t, _) = q.shape, k.shape
    width = triton.next_power_of_2(d)
    m, n, warps, stages = _tiles(FORWARD, q)
    blocks = triton.cdiv(s, m)
    with device_of(q):
        forward[(blocks * b * h,)](
            descriptor(q, m, width), descriptor(k, n, width), descriptor(v, n, width), descriptor(out, m, width),
            lse, scale * LOG2_E, blocks, h, h // hk, section(b * h), t, lse.shape[2],
            CAUSAL=causal, D=width, M=m, N=n, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, lse


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _like(q), _statistics(q)


@custom_op("forge::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _like(q), _like(k), _like(v)
    if not out.numel() or not k.shape[2]:
        return dq.zero_(), dk.zero_(), dv.zero_()
    grad, q, k, v, out = movable(grad), movable(q), movable(k), movable(v), movable(out)
    (b, h, s, d), (_, hk, t, _) = q.shape, k.shape
    delta = torch.empty_like(lse)
    width = triton.next_power_of_2(d)
    m, n, warps, stages = _tiles(QUERIES, q)
    blocks = triton.cdiv(s, m)
    of_q, of_k, of_v = descriptor(q, m, width), descriptor(k, n, width), descriptor(v, n, width)
    of_grad = descriptor(grad, m, width)
    with device_of(q):
        queries[(blocks * b * h,)](
            of_q, of_k, of_v, descriptor(out, m, width), of_grad, descriptor(dq, m, width),
            lse, delta, scale * LOG2_E, scale, blocks, h, h // hk, section(b * h), t, lse.shape[2],
            CAUSAL=causal, D=width, M=m, N=n, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    before, (m, n, warps, stages) = (m, n), _tiles(KEYS, q)
    if (m, n) != before:
        of_q, of_k, of_v = descriptor(q, m, width), descriptor(k, n, width), descriptor(v, n, width)
        of_grad = descriptor(grad, m, width)
    blocks = triton.cdiv(t, n)
    with device_of(q):
        keys_and_values[(blocks * b * hk,)](
            of_q, of_k, of_v, of_grad, descriptor(dk, n, width), descriptor(dv, n, width),
            lse, delta, scale * LOG2_E, scale, blocks, hk, h // hk, section(b * hk), s, lse.shape[2],
            CAUSAL=causal, D=width, M=m, N=n, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, dv


@attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _keep(ctx, inputs, output) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse)


def _differentiate(ctx, grad, _):
    return *attention_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None


attention.register_autograd(_differentiate, setup_context=_keep)
