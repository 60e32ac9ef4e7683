"""matmul: a matrix product with bias."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.errors import KernelError
from forge_kernels.contract import Kernel, as_autocast, check_floating, falls_back, triton_module, unusable

ops = triton_module("matmul")


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a @ b + bias, for a of (..., K), b of (K, N) and a bias of (N,).

    b may have any strides, such as those of `weight.t()`. Products are summed in float32; float32 itself is multiplied
    in full precision unless torch is set to TF32. Under autocast all arguments are cast as torch.matmul would. The
    backward runs torch's own matrix products.
    """
    _check(a, b, bias)
    if autocast_is_on(a):
        a, b, bias = as_autocast(a), as_autocast(b), as_autocast(bias)
    check_dtypes("matmul", a=a, b=b, bias=bias)
    if falls_back("matmul", supports(a, b, bias)):
        return matmul_reference(a, b, bias)
    return ops.matmul(a, b, bias)


def matmul_reference(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(a, b.t(), bias)


def supports(a: Tensor, b: Tensor, bias: Tensor | None = None) -> str | None:
    return unusable(a, b, bias)


# -- shared with mlp ---------------------------------------------------------------------------------------------------


def check_dtypes(name: str, **tensors: Tensor | None) -> None:
    """Raise KernelError unless all tensors have one floating-point dtype and device."""
    check_floating(name, **tensors)
    given = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    first = next(iter(given.values()))
    if any(tensor.dtype != first.dtype or tensor.device != first.device for tensor in given.values()):
        found = ", ".join(f"{key} {tensor.dtype} on {tensor.device}" for key, tensor in given.items())
        raise KernelError(
            f"forge.kernels.{name} needs arguments of one dtype on one device; it got {found}. Cast them, or run under "
            "torch.autocast."
        )


def autocast_is_on(x: Tensor) -> bool:
    """Whether autocast is on for the tensor's device; False for meta tensors, for which torch raises an error."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _check(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    fits = a.dim() >= 1 and b.dim() == 2 and a.shape[-1] == b.shape[0]
    if not fits or (bias is not None and bias.shape != b.shape[1:]):
        raise KernelError(
            "forge.kernels.matmul needs a of (..., K), b of (K, N) and bias of (N,) or None; it got "
            f"{tuple(a.shape)}, {tuple(b.shape)} and {None if bias is None else tuple(bias.shape)}."
        )


MATMUL = Kernel(
    name="matmul",
    function=matmul,
    reference=matmul_reference,
    supports=supports,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
)
