"""rms_norm and layer_norm."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.errors import KernelError
from forge_kernels.contract import (
    HALF_TO_FULL,
    Case,
    Cost,
    Functional,
    Kernel,
    check_floating,
    falls_back,
    plain,
    triton_module,
    unusable,
)
from forge_kernels.torch_internals import autocast_widens

ops = triton_module("norms")

WIDEST = 8192
"""The widest supported row: it must fit the registers of a program."""


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """RMSNorm over the last dimension: x / sqrt(mean(x²) + eps) · weight.

    With `residual` it normalises h = x + residual and returns both: (rms_norm(h), h).

    The computation is in float32. The result has x's dtype for any dtype of the weight, also under autocast: bfloat16
    stays bfloat16, where `torch.nn.functional` may return float32. `dtype` requests another. h has the wider dtype of x
    and residual, as in plain torch.
    """
    return _norm("rms_norm", x, residual, weight, None, eps, dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """LayerNorm over the last dimension: (x - mean(x)) / sqrt(var(x) + eps) · weight + bias.

    With `residual` it normalises h = x + residual and returns both: (layer_norm(h), h). Dtypes are as for `rms_norm`.
    """
    return _norm("layer_norm", x, residual, weight, bias, eps, dtype)


def _norm(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
) -> Any:
    _check(name, x, residual, weight, bias, dtype)
    dtype, h, centred = dtype or x.dtype, x if residual is None else x + residual, name == "layer_norm"
    if falls_back(name, supports_layer(h, weight, bias, dtype=dtype)):
        y = _plain(h, weight, bias, eps, centred, dtype)
    else:
        y = ops.norm(h, weight, bias, eps, centred, dtype)[0]
    return y if residual is None else (y, h)


def _plain(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    weight, bias = (None if vector is None else vector.to(wide.dtype) for vector in (weight, bias))
    if centred:
        return F.layer_norm(wide, wide.shape[-1:], weight, bias, eps).to(dtype)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(dtype)


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    h = x if residual is None else x + residual
    y = _plain(h, weight, None, eps, False, dtype or x.dtype)
    return y if residual is None else (y, h)


def layer_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    h = x if residual is None else x + residual
    y = _plain(h, weight, bias, eps, True, dtype or x.dtype)
    return y if residual is None else (y, h)


def supports_rms(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *rest: Any, **options: Any) -> str | None:
    return supports_layer(x, weight, None, eps, *rest, **options)


def supports_layer(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> str | None:
    if dtype is not None and dtype not in HALF_TO_FULL:
        return "it returns bfloat16, float16 or float32"
    if x.shape[-1] > WIDEST:
        return f"it supports rows of at most {WIDEST} entries"
    return unusable(x, residual, weight, bias)


def cost(x: Tensor, *rest: Any, residual: Tensor | None = None, dtype: torch.dtype | None = None) -> Cost:
    # forward reads x and writes y; backward reads x and dy and writes dx
    size = 3 * x.itemsize + 2 * (dtype or x.dtype).itemsize
    if residual is not None:  # read, and h written
        size += residual.itemsize + max(x.itemsize, residual.itemsize)
    return Cost(flops=20 * x.numel(), bytes=size * x.numel())


def _check(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None,
) -> None:
    check_floating(name, x=x, residual=residual, weight=weight, bias=bias)
    if dtype is not None and not dtype.is_floating_point:
        raise KernelError(f"forge.kernels.{name} returns floating-point numbers, not {dtype}.")
    if x.dim() == 0:
        raise KernelError(f"forge.kernels.{name} normalises the last dimension; x has none.")
    if residual is not None and (residual.shape != x.shape or residual.device != x.device):
        raise KernelError(
            f"forge.kernels.{name} needs residual of x's shape and device; it got {tuple(residual.shape)} on "
            f"{residual.device} for {tuple(x.shape)} on {x.device}."
        )
    for what, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != x.shape[-1:] or vector.device != x.device):
            raise KernelError(
                f"forge.kernels.{name} needs {what} of shape {tuple(x.shape[-1:])} on {x.device}, the last dimension "
                f"of x; it got {tuple(vector.shape)} on {vector.device}."
            )


# -- replacing torch's functions---------------------------------------------------------------------------------------


_WIDENED = {name: autocast_widens(name) for name in ("layer_norm", "rms_norm")}
"""Whether autocast runs torch's own function in float32 on CUDA; rms_norm in later versions only. On a CPU it runs
neither in float32. None: unknown."""


def stand_in_for_layer_norm(
    original: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Replace torch's `layer_norm`, with torch's dtypes: float32 under CUDA's autocast, unlike forge's."""
    dtype = _dtype("layer_norm", input)
    if dtype and _fits(input, normalized_shape, weight, bias) and supports_layer(input, weight, bias) is None:
        return layer_norm(input, weight, bias, eps, dtype=dtype)
    return original(input, normalized_shape, weight, bias, eps)


def stand_in_for_rms_norm(
    original: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Replace torch's `rms_norm`, with torch's dtypes: unlike forge's, float32 under CUDA's autocast if this version of
    torch does so. The default eps is float32's, the dtype of the computation, for any dtype of the input."""
    dtype = _dtype("rms_norm", input)
    if dtype and _fits(input, normalized_shape, weight) and supports_rms(input, weight) is None:
        return rms_norm(input, weight, torch.finfo(torch.float32).eps if eps is None else eps, dtype=dtype)
    return original(input, normalized_shape, weight, eps)


def _dtype(name: str, x: Tensor) -> torch.dtype | None:
    """Return the dtype of the result of torch's own function, if it is known."""
    if not isinstance(x, Tensor) or not x.is_cuda or not torch.is_autocast_enabled("cuda"):
        return getattr(x, "dtype", None)
    return {True: torch.float32, False: x.dtype, None: None}[_WIDENED[name]]


def _fits(x: Tensor, normalized_shape: Any, *vectors: Tensor | None) -> bool:
    """Whether one dimension of plain tensors is normalised; torch reports invalid arguments."""
    if not isinstance(x, Tensor) or not plain(x, *vectors):
        return False
    if len(normalized_shape) != 1 or x.dim() == 0 or x.shape[-1] != normalized_shape[0]:
        return False
    return all(vector is None or (vector.shape == x.shape[-1:] and vector.device == x.device) for vector in vectors)


def _make(vectors: int, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x = torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)
    return x, *(torch.randn(columns, device=device, dtype=dtype, requires_grad=True) for _ in range(vectors))


_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
_SHAPES = ((16384, 768), (16384, 2048), (16384, 4096), (8192, 8192))


RMS_NORM = Kernel(
    name="rms_norm",
    summary="x / sqrt(mean(x²) + eps) · weight",
    function=rms_norm,
    reference=rms_norm_reference,
    supports=supports_rms,
    tolerance=_TOLERANCE,
    cost=cost,
    cases=tuple(Case(f"{rows}×{columns}", partial(_make, 1, rows, columns)) for rows, columns in _SHAPES),
    replaces=(Functional("torch.nn.functional.rms_norm", stand_in_for_rms_norm),),
)
LAYER_NORM = Kernel(
    name="layer_norm",
    summary="(x - mean(x)) / sqrt(var(x) + eps) · weight + bias",
    function=layer_norm,
    reference=layer_norm_reference,
    supports=supports_layer,
    tolerance=_TOLERANCE,
    cost=cost,
    cases=tuple(Case(f"{rows}×{columns}", partial(_make, 2, rows, columns)) for rows, columns in _SHAPES),
    replaces=(Functional("torch.nn.functional.layer_norm", stand_in_for_layer_norm),),
)
