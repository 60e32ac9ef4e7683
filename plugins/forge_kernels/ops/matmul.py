"""matmul: a matrix product with bias and activation in one pass."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.errors import KernelError
from forge_kernels.contract import Case, Cost, Kernel, as_autocast, check_floating, falls_back, triton_module, unusable

ops = triton_module("matmul")

ACTIVATIONS = {
    None: lambda x: x,
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """Return activation(a @ b + bias), for a of (..., K), b of (K, N) and a bias of (N,).

    b may have any strides, such as those of `weight.t()`. The activation is gelu (the tanh form), gelu_erf, relu, silu
    or None. Products are summed in float32; float32 itself is multiplied in full precision unless torch is set to TF32.
    Under autocast all arguments are cast as torch.matmul would. The backward runs torch's own matrix products, and one
    pass for the gradients of activation and bias.
    """
    check_activation("matmul", activation)
    _check(a, b, bias)
    if autocast_is_on(a):
        a, b, bias = as_autocast(a), as_autocast(b), as_autocast(bias)
    check_dtypes("matmul", a=a, b=b, bias=bias)
    if falls_back("matmul", supports(a, b, bias, activation)):
        return matmul_reference(a, b, bias, activation)
    keep = activation is not None and wants_grad(a, b, bias)
    return ops.matmul(a, b, bias, activation or "none", keep)[0]


def matmul_reference(a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    return ACTIVATIONS[activation](F.linear(a, b.t(), bias))


def supports(a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str | None = None) -> str | None:
    return unusable(a, b, bias)


def cost(a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Cost:
    rows, columns = a.numel() // max(1, a.shape[-1]), b.shape[1]
    flops = 2 * rows * b.numel()
    # forward reads both factors and writes the product; backward reads its gradient and both factors and writes theirs
    size = (2 * rows * columns + 3 * a.numel() + 3 * b.numel()) * a.itemsize
    if activation is not None:
        size += 2 * rows * columns * a.itemsize  # its input, written and read
    return Cost(flops=3 * flops, bytes=size)


# -- shared with mlp ---------------------------------------------------------------------------------------------------


def check_activation(name: str, activation: str | None) -> None:
    if activation not in ACTIVATIONS:
        known = ", ".join(str(known) for known in ACTIVATIONS)
        raise KernelError(f"forge.kernels.{name} has no activation {activation!r}. It has: {known}.")


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


def wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _check(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    fits = a.dim() >= 1 and b.dim() == 2 and a.shape[-1] == b.shape[0]
    if not fits or (bias is not None and bias.shape != b.shape[1:]):
        raise KernelError(
            "forge.kernels.matmul needs a of (..., K), b of (K, N) and bias of (N,) or None; it got "
            f"{tuple(a.shape)}, {tuple(b.shape)} and {None if bias is None else tuple(bias.shape)}."
        )


def _make(rows: int, depth: int, columns: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    a = torch.randn(rows, depth, device=device, dtype=dtype, requires_grad=True)
    b = torch.randn(depth, columns, device=device, dtype=dtype, requires_grad=True)
    return a, b


MATMUL = Kernel(
    name="matmul",
    summary="activation(a @ b + bias)",
    function=matmul,
    reference=matmul_reference,
    supports=supports,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
    cost=cost,
    cases=(
        Case("4096³", partial(_make, 4096, 4096, 4096)),
        Case("8192³", partial(_make, 8192, 8192, 8192)),
        Case("65536×768×3072 gelu", partial(_make, 65536, 768, 3072), {"activation": "gelu"}),
    ),
)
