"""attention: softmax(q·kᵀ)·v without storing the scores."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.errors import KernelError
from forge_kernels.contract import (
    Kernel,
    as_autocast,
    check_floating,
    falls_back,
    plain,
    triton_module,
    unusable,
)

ops = triton_module("attention")
_torch = F.scaled_dot_product_attention  # the plugin `kernels` may replace it


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    """Return softmax(scale · q·kᵀ)·v for q of (batch, heads, S, size) and k, v of (batch, key heads, T, size).

    `heads` is a multiple of `key heads`, and each key head serves that many heads in a row (grouped-query attention).
    `scale` is 1/√size unless given. With `causal` query i sees keys 0 to i, also where S and T differ: the mask starts
    in the upper left corner, as in torch's `is_causal=True`. Without keys (T = 0) the result is 0.

    Any strides work, such as those of `x.view(batch, S, heads, size).transpose(1, 2)`, without a copy. The result has
    q's memory layout, so `.transpose(1, 2).reshape(batch, S, -1)` is free. Under autocast all three are cast to its
    dtype, as in torch.
    """
    q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
    check_floating("attention", q=q, k=k, v=v)
    if wrong := _wrong(q, k, v):
        raise KernelError(f"forge.kernels.attention needs {wrong}.")
    if falls_back("attention", supports(q, k, v, causal, scale)):
        return attention_reference(q, k, v, causal, scale)
    size = q.shape[3]
    factor = 1 / math.sqrt(size) if scale is None else scale
    missing = -size % (16 // q.itemsize)  # rows must start at multiples of 16 bytes
    if missing:
        q, k, v = F.pad(q, (0, missing)), F.pad(k, (0, missing)), F.pad(v, (0, missing))
        return ops.attention(q, k, v, causal, factor)[0][..., :size]
    return ops.attention(q, k, v, causal, factor)[0]


def attention_reference(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    return _torch(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def supports(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> str | None:
    if scale is not None and not 0 < scale < math.inf:
        return "it needs a finite scale above 0"
    if not 16 <= q.shape[3] <= 256:
        return "it needs heads of size 16 to 256"
    return unusable(q, k, v)


def _wrong(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return what these arguments lack, or None."""
    got = f"it got q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return f"q (batch, heads, S, size) and k, v (batch, key heads, T, size); {got}"
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"as many heads as key heads, or a multiple of them; {got}"
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        got = f"{q.dtype} on {q.device}, {k.dtype} on {k.device} and {v.dtype} on {v.device}"
        return f"q, k and v of the same dtype and device; it got {got}"
    return None


def stand_in(
    original: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    tensors = all(isinstance(x, Tensor) for x in (query, key, value))
    if tensors and plain(query, key, value) and attn_mask is None and dropout_p == 0.0:
        q, k, v = as_autocast(query), as_autocast(key), as_autocast(value)
        fits = _wrong(q, k, v) is None and (enable_gqa or q.shape[1] == k.shape[1])
        if fits and supports(q, k, v, is_causal, scale) is None:
            return attention(q, k, v, is_causal, scale)
    return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


ATTENTION = Kernel(
    name="attention",
    function=attention,
    reference=attention_reference,
    supports=supports,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
    replaces={"torch.nn.functional.scaled_dot_product_attention": stand_in},
)
