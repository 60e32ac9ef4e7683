"""rope: rotary position embedding of queries and keys."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from forge.errors import KernelError
from forge_kernels.contract import Case, Cost, Kernel, check_floating, falls_back, triton_module, unusable

ops = triton_module("rope")


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Return q and k rotated by the angles of their positions: new tensors, in the memory layout of q and k.

    q is (batch, heads, length, entries), k the same with heads of its own; any strides work, so views such as
    `projected.view(batch, length, heads, entries).transpose(1, 2)` are not copied. cos and sin are (length, entries),
    as in Llama, or (length, entries / 2), one angle for each pair; a batch dimension of 1 or `batch` may come first. A
    pair is an entry of the first half of a head and the corresponding one of the second half; `interleaved` pairs
    neighbours (GPT-J). The computation is in float32.
    """
    _check(q, k, cos, sin)
    if falls_back("rope", supports(q, k, cos, sin, interleaved)):
        return rope_reference(q, k, cos, sin, interleaved)
    return ops.rope(q, k, cos, sin, interleaved, False)


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    if cos.shape[-1] != q.shape[-1]:
        both = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat([t, t], -1))
        cos, sin = both(cos), both(sin)
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    wide = torch.promote_types(q.dtype, torch.float32)
    cos, sin = cos.to(wide), sin.to(wide)

    def turn(x: Tensor) -> Tensor:
        turned = _quarter(x.to(wide), interleaved)
        return (x.to(wide) * cos + turned * sin).to(x.dtype)

    return turn(q), turn(k)


def _quarter(x: Tensor, interleaved: bool) -> Tensor:
    """Replace every pair (a, b) by (-b, a)."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def supports(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> str | None:
    if cos.requires_grad or sin.requires_grad:
        return "it does not compute gradients of cos and sin"
    if q.dtype != k.dtype:
        return "q and k differ in dtype"
    return unusable(q, k, cos, sin)


def cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Cost:
    # q and k are read and written once, forward and again backward
    entries = q.numel() + k.numel()
    return Cost(flops=6 * entries, bytes=4 * entries * q.itemsize)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_floating("rope", q=q, k=k, cos=cos, sin=sin)
    if q.dim() != 4 or k.dim() != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]) or q.shape[-1] % 2:
        raise KernelError(
            "forge.kernels.rope needs q (batch, heads, length, entries) and k, which may differ in heads only, with an "
            f"even number of entries; it got {tuple(q.shape)} and {tuple(k.shape)}."
        )
    batch, _, length, entries = q.shape
    fits = cos.dim() in (2, 3) and cos.shape[-2] == length and cos.shape[-1] in (entries, entries // 2)
    if not fits or cos.shape != sin.shape or (cos.dim() == 3 and cos.shape[0] not in (1, batch)):
        raise KernelError(
            f"forge.kernels.rope needs cos and sin of shape {(length, entries)} or {(length, entries // 2)} for q of "
            f"shape {tuple(q.shape)}; it got {tuple(cos.shape)} and {tuple(sin.shape)}."
        )
    if not q.device == k.device == cos.device == sin.device:
        raise KernelError(
            f"forge.kernels.rope needs all its tensors on one device; they are on {q.device}, {k.device}, {cos.device} "
            f"and {sin.device}."
        )


def _make(
    batch: int, length: int, q_heads: int, k_heads: int, entries: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k = (
        torch.randn(batch, length, heads, entries, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (q_heads, k_heads)
    )
    rates = 10000 ** (-torch.arange(0, entries, 2, device=device) / entries)
    angles = (torch.arange(length, device=device)[:, None] * rates).repeat(1, 2)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


ROPE = Kernel(
    name="rope",
    summary="rotary position embedding of q and k",
    function=rope,
    reference=rope_reference,
    supports=supports,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
    cost=cost,
    cases=(Case("B4 S2048 H32/8 D128", partial(_make, 4, 2048, 32, 8, 128)),),
)
