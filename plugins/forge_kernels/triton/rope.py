"""Rotary embedding of q and k in one launch, for any strides.

A program rotates some of the heads at one position, over the whole batch if all of it shares the angles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from forge_kernels.contract import device_of


def plan(pairs: int) -> tuple[int, int]:
    """Return heads and warps of a program for a padded number of pairs in a head."""
    return max(1, 2048 // pairs), 4


@triton.jit
def _rope(
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    length,
    share,
    pairs,
    q_heads,
    k_heads,
    q_batch,
    q_head,
    q_place,
    k_batch,
    k_head,
    k_place,
    q_out_batch,
    q_out_head,
    q_out_place,
    k_out_batch,
    k_out_head,
    k_out_place,
    angle_group,
    angle_place,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    FULL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    q_blocks = tl.cdiv(share * q_heads, ROWS)
    blocks = q_blocks + tl.cdiv(share * k_heads, ROWS)
    at = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    group = at // length
    place = (at % length).to(tl.int64)
    if block < q_blocks:
        x, out, heads = q + place * q_place, q_out + place * q_out_place, q_heads
        x_batch, x_head, out_batch, out_head = q_batch, q_head, q_out_batch, q_out_head
    else:
        block -= q_blocks
        x, out, heads = k + place * k_place, k_out + place * k_out_place, k_heads
        x_batch, x_head, out_batch, out_head = k_batch, k_head, k_out_batch, k_out_head
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    exists = row < share * heads
    batch = (group * share + row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    x += batch * x_batch + head * x_head
    out += batch * out_batch + head * out_head

    pair = tl.arange(0, PAIRS)[None, :]
    real = pair < pairs
    angle = group.to(tl.int64) * angle_group + place * angle_place
    # FULL: angles are given for both members of a pair, though usually equal
    step: tl.constexpr = 2 if FULL and INTERLEAVED else 1
    c = tl.load(cos + angle + pair * step, mask=real, other=0).to(tl.float32)
    s = tl.load(sin + angle + pair * step, mask=real, other=0).to(tl.float32)
    c_second = c
    s_second = s
    if FULL:
        second = 1 if INTERLEAVED else pairs
        c_second = tl.load(cos + angle + pair * step + second, mask=real, other=0).to(tl.float32)
        s_second = tl.load(sin + angle + pair * step + second, mask=real, other=0).to(tl.float32)
    if INVERSE:
        s, s_second = -s_second, -s

    if INTERLEAVED:
        entry = tl.arange(0, 2 * PAIRS)[None, :]
        inside = exists & (entry < 2 * pairs)
        both = tl.load(x + entry, mask=inside, other=0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (ROWS, PAIRS, 2)))
        turned = tl.join(a * c - b * s, b * c_second + a * s_second)
        tl.store(out + entry, tl.reshape(turned, (ROWS, 2 * PAIRS)), mask=inside)
    else:
        inside = exists & real
        a = tl.load(x + pair, mask=inside, other=0).to(tl.float32)
        b = tl.load(x + pairs + pair, mask=inside, other=0).to(tl.float32)
        tl.store(out + pair, a * c - b * s, mask=inside)
        tl.store(out + pairs + pair, b * c_second + a * s_second, mask=inside)


@custom_op("forge::rope", mutates_args=())
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    """Rotate q and k; `inverse` multiplies by the transposed matrix, for the backward pass."""
    q, k = _rows_of_ones(q), _rows_of_ones(k)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    batch, q_heads, length, entries = q.shape
    if not q.numel() + k.numel():
        return q_out, k_out
    cos, sin = cos.contiguous(), sin.contiguous()
    pairs = entries // 2
    block = triton.next_power_of_2(pairs)
    at_once, warps = plan(block)
    groups = cos.shape[0] if cos.dim() == 3 else 1
    share = batch // groups
    blocks = triton.cdiv(share * q_heads, at_once) + triton.cdiv(share * k.shape[1], at_once)
    with device_of(q):
        _rope[(groups * length * blocks,)](
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            length,
            share,
            pairs,
            q_heads,
            k.shape[1],
            *q.stride()[:3],
            *k.stride()[:3],
            *q_out.stride()[:3],
            *k_out.stride()[:3],
            cos.stride(0) if cos.dim() == 3 else 0,
            cos.stride(-2),
            at_once,
            block,
            cos.shape[-1] == entries,
            interleaved,
            inverse,
            num_warps=warps,
        )
    return q_out, k_out


@rope.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_rows_of_ones(q)), torch.empty_like(_rows_of_ones(k))


def _rows_of_ones(x: Tensor) -> Tensor:
    """Return x with contiguous entries of a head."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _keep(ctx, inputs, output) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx, dq, dk):
    cos, sin = ctx.saved_tensors
    return *rope(dq, dk, cos, sin, ctx.interleaved, not ctx.inverse), None, None, None, None


rope.register_autograd(_differentiate, setup_context=_keep)
