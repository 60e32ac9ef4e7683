"""cudnn_attention: torch's attention, with cuDNN's kernel before the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge_kernels.contract import Functional, Kernel, falls_back, plain, unusable
from forge_kernels.ops.attention import ATTENTION, attention_reference, cost

_torch = F.scaled_dot_product_attention  # the plugin `kernels` may replace it
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    """Return torch's scaled_dot_product_attention, computed by cuDNN where it can.

    Arguments are those of `forge.kernels.attention`. torch prefers its flash kernel on most devices; cuDNN's is often
    faster on Hopper and newer ones. Arguments that cuDNN does not support go to torch's next kernel.
    """
    if falls_back("cudnn_attention", supports(q, k, v, causal, scale)):
        return attention_reference(q, k, v, causal, scale)
    with sdpa_kernel(CUDNN_FIRST, set_priority=True):
        return _torch(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def supports(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> str | None:
    if q.device.type != "cuda":
        return f"it runs on CUDA, not on {q.device.type}"
    if not torch.backends.cudnn.is_available():
        return "cuDNN is not available"
    return unusable(q, k, v)


def _stand_in(
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
    fits = tensors and plain(query, key, value) and attn_mask is None and dropout_p == 0.0
    if fits and supports(query, key, value) is None:
        with sdpa_kernel(CUDNN_FIRST, set_priority=True):
            return _torch(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


CUDNN_ATTENTION = Kernel(
    name="cudnn_attention",
    summary="torch's attention with cuDNN's kernel first",
    function=cudnn_attention,
    reference=attention_reference,
    supports=supports,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
    cost=cost,
    cases=ATTENTION.cases,
    replaces=(Functional("torch.nn.functional.scaled_dot_product_attention", _stand_in, fuses=False),),
)
