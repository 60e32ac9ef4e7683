"""rms_norm and layer_norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.errors import KernelError
from forge_kernels.contract import (
    HALF_TO_FULL,
    Kernel,
    check_floating,
    falls_back,
    plain,
    triton_module,
    unusable,
)

ops = triton_module("norms")

WIDEST = 8192
"""The widest supported row: it must fit the registers of a program."""


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, dtype: torch.dtype | None = None) -> Tensor:
    """RMSNorm over the last dimension: x / sqrt(mean(x²) + eps) · weight.

    The computation is in float32. The result has x's dtype for any dtype of the weight, also under autocast: bfloat16
    stays bfloat16, where `torch.nn.functional` may return float32. `dtype` requests another.
    """
    _check("rms_norm", x, weight, None, dtype)
    if falls_back("rms_norm", supports_rms(x, weight, eps, dtype)):
        return rms_norm_reference(x, weight, eps, dtype)
    return ops.norm(x, weight, None, eps, False, dtype or x.dtype)[0]


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """LayerNorm over the last dimension: (x - mean(x)) / sqrt(var(x) + eps) · weight + bias.

    Dtypes are as for `rms_norm`.
    """
    _check("layer_norm", x, weight, bias, dtype)
    if falls_back("layer_norm", supports_layer(x, weight, bias, eps, dtype)):
        return layer_norm_reference(x, weight, bias, eps, dtype)
    return ops.norm(x, weight, bias, eps, True, dtype or x.dtype)[0]


def rms_norm_reference(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, dtype: torch.dtype | None = None
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(wide.dtype)).to(dtype or x.dtype)


def layer_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    weight, bias = (None if vector is None else vector.to(wide.dtype) for vector in (weight, bias))
    return F.layer_norm(wide, wide.shape[-1:], weight, bias, eps).to(dtype or x.dtype)


def supports_rms(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, dtype: torch.dtype | None = None
) -> str | None:
    return supports_layer(x, weight, None, eps, dtype)


def supports_layer(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> str | None:
    if dtype is not None and dtype not in HALF_TO_FULL:
        return "it returns bfloat16, float16 or float32"
    if x.shape[-1] > WIDEST:
        return f"it supports rows of at most {WIDEST} entries"
    return unusable(x, weight, bias)


def _check(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype | None) -> None:
    check_floating(name, x=x, weight=weight, bias=bias)
    if dtype is not None and not dtype.is_floating_point:
        raise KernelError(f"forge.kernels.{name} returns floating-point numbers, not {dtype}.")
    if x.dim() == 0:
        raise KernelError(f"forge.kernels.{name} normalises the last dimension; x has none.")
    for what, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != x.shape[-1:] or vector.device != x.device):
            raise KernelError(
                f"forge.kernels.{name} needs {what} of shape {tuple(x.shape[-1:])} on {x.device}, the last dimension "
                f"of x; it got {tuple(vector.shape)} on {vector.device}."
            )


# -- replacing torch's functions---------------------------------------------------------------------------------------


_WIDENED = {"layer_norm": True, "rms_norm": torch.__version__ >= "2.12"}
"""Whether autocast runs torch's own function in float32 on CUDA. On a CPU it runs neither in float32."""


def stand_in_for_layer_norm(
    original: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Replace torch's `layer_norm`, with torch's dtypes: float32 under CUDA's autocast, unlike forge's."""
    if _fits(input, normalized_shape, weight, bias) and supports_layer(input, weight, bias) is None:
        return layer_norm(input, weight, bias, eps, _dtype("layer_norm", input))
    return original(input, normalized_shape, weight, bias, eps)


def stand_in_for_rms_norm(
    original: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Replace torch's `rms_norm`, with torch's dtypes: unlike forge's, float32 under CUDA's autocast if this version of
    torch does so. The default eps is float32's, the dtype of the computation, for any dtype of the input."""
    if _fits(input, normalized_shape, weight) and supports_rms(input, weight) is None:
        eps = torch.finfo(torch.float32).eps if eps is None else eps
        return rms_norm(input, weight, eps, _dtype("rms_norm", input))
    return original(input, normalized_shape, weight, eps)


def _dtype(name: str, x: Tensor) -> torch.dtype:
    """Return the dtype of the result of torch's own function."""
    return torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") and _WIDENED[name] else x.dtype


def _fits(x: Tensor, normalized_shape: Any, *vectors: Tensor | None) -> bool:
    """Whether one dimension of plain tensors is normalised; torch reports invalid arguments."""
    if not isinstance(x, Tensor) or not plain(x, *vectors):
        return False
    if len(normalized_shape) != 1 or x.dim() == 0 or x.shape[-1] != normalized_shape[0]:
        return False
    return all(vector is None or (vector.shape == x.shape[-1:] and vector.device == x.device) for vector in vectors)


_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


RMS_NORM = Kernel(
    name="rms_norm",
    function=rms_norm,
    reference=rms_norm_reference,
    supports=supports_rms,
    tolerance=_TOLERANCE,
    replaces={"torch.nn.functional.rms_norm": stand_in_for_rms_norm},
)
LAYER_NORM = Kernel(
    name="layer_norm",
    function=layer_norm,
    reference=layer_norm_reference,
    supports=supports_layer,
    tolerance=_TOLERANCE,
    replaces={"torch.nn.functional.layer_norm": stand_in_for_layer_norm},
)
