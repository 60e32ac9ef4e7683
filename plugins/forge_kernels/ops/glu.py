"""swiglu and geglu: gated linear units."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.errors import KernelError
from forge_kernels.contract import Case, Cost, Kernel, check_floating, falls_back, triton_module, unusable

ops = triton_module("glu")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU(gate) · up, for tensors of the same shape and dtype."""
    _check("swiglu", gate, up)
    if falls_back("swiglu", supports(gate, up)):
        return swiglu_reference(gate, up)
    return ops.glu(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return GELU(gate) · up with the tanh form of GELU, for tensors of the same shape and dtype."""
    _check("geglu", gate, up)
    if falls_back("geglu", supports(gate, up)):
        return geglu_reference(gate, up)
    return ops.glu(gate, up, "gelu")


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def supports(gate: Tensor, up: Tensor) -> str | None:
    return unusable(gate, up)


def cost(gate: Tensor, up: Tensor) -> Cost:
    # forward reads two and writes one; backward reads three and writes two
    return Cost(flops=20 * gate.numel(), bytes=8 * gate.numel() * gate.itemsize)


def _check(name: str, gate: Tensor, up: Tensor) -> None:
    check_floating(name, gate=gate, up=up)
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        raise KernelError(
            f"forge.kernels.{name} needs gate and up of the same shape, dtype and device; it got "
            f"{tuple(gate.shape)} {gate.dtype} on {gate.device} and {tuple(up.shape)} {up.dtype} on {up.device}."
        )


def _make(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate = torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)
    up = torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)
    return gate, up


_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
_CASES = (Case("16384×8192", partial(_make, 16384, 8192)), Case("8192×14336", partial(_make, 8192, 14336)))

SWIGLU = Kernel(
    name="swiglu",
    summary="SiLU(gate) · up",
    function=swiglu,
    reference=swiglu_reference,
    supports=supports,
    tolerance=_TOLERANCE,
    cost=cost,
    cases=_CASES,
)
GEGLU = Kernel(
    name="geglu",
    summary="GELU(gate) · up, tanh form",
    function=geglu,
    reference=geglu_reference,
    supports=supports,
    tolerance=_TOLERANCE,
    cost=cost,
    cases=_CASES,
)
