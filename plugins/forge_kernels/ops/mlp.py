"""mlp: two linear layers with an activation between them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.errors import KernelError
from forge_kernels.contract import (
    HALF_TO_FULL,
    Kernel,
    as_autocast,
    falls_back,
    triton_module,
    unusable,
)
from forge_kernels.ops.matmul import autocast_is_on, check_dtypes

ops = triton_module("mlp")

ACTIVATIONS = {
    None: lambda x: x,
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


def mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str | None = "gelu"
) -> Tensor:
    """Return activation(x @ w1ᵀ + b1) @ w2ᵀ + b2, with weights in nn.Linear's layout.

    x is of (..., D), w1 of (H, D), w2 of (D', H); biases may be None. The activation is gelu (the tanh form), gelu_erf,
    relu, silu or None. Under autocast all arguments are cast as nn.Linear would, and gradients come in the dtype of the
    parameters; without it, float32 runs as plain torch.
    """
    _check(x, w1, b1, w2, b2, activation)
    if autocast_is_on(x):
        x, w1, w2 = as_autocast(x), as_autocast(w1), as_autocast(w2)
        b1, b2 = as_autocast(b1), as_autocast(b2)
    check_dtypes("mlp", x=x, w1=w1, b1=b1, w2=w2, b2=b2)
    if falls_back("mlp", supports(x, w1, b1, w2, b2, activation)):
        return mlp_reference(x, w1, b1, w2, b2, activation)
    kind = activation or "none"
    tensors = (x, w1, b1, w2, b2)
    learns = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    pre, hidden = ops.first(x, w1, b1, kind, learns)
    out = ops.Second.apply(pre, hidden, b1, w2, b2, kind) if learns else F.linear(hidden, w2, b2)
    return out.view(*x.shape[:-1], w2.shape[0])


def mlp_reference(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str | None = "gelu"
) -> Tensor:
    return F.linear(ACTIVATIONS[activation](F.linear(x, w1, b1)), w2, b2)


def supports(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str | None = "gelu"
) -> str | None:
    # float32 does not use the matrix units, so little is gained over torch's own products
    dtypes = HALF_TO_FULL if autocast_is_on(x) else (torch.bfloat16, torch.float16)
    return unusable(x, w1, b1, w2, b2, dtypes=dtypes)


def _check(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str | None) -> None:
    if activation not in ACTIVATIONS:
        known = ", ".join(str(known) for known in ACTIVATIONS)
        raise KernelError(f"forge.kernels.mlp has no activation {activation!r}. It has: {known}.")
    fits = (
        x.dim() >= 1 and w1.dim() == 2 and w2.dim() == 2 and x.shape[-1] == w1.shape[1] and w1.shape[0] == w2.shape[1]
    )
    for bias, weight in ((b1, w1), (b2, w2)):
        fits = fits and (bias is None or bias.shape == weight.shape[:1])
    if not fits:
        shapes = ", ".join("None" if t is None else str(tuple(t.shape)) for t in (x, w1, b1, w2, b2))
        raise KernelError(
            "forge.kernels.mlp needs x of (..., D), w1 of (H, D), b1 of (H,) or None, w2 of (D', H) and b2 of (D',) or "
            f"None; it got {shapes}."
        )


MLP = Kernel(
    name="mlp",
    function=mlp,
    reference=mlp_reference,
    supports=supports,
    tolerance={torch.bfloat16: 1e-2, torch.float16: 2e-3},
)
