"""all_finite: whether every entry of a list of tensors is finite, in C++; the pattern for operators that need C++.

Schema, fake function and reference are here, the kernel is in finite.cpp. The operator starts as Python: its first call
on CPU tensors builds and loads the C++, which replaces it in torch's dispatcher; if that fails, the reference runs. So
nothing is built at import, and torch.compile always sees one operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from forge.errors import KernelError
from forge_kernels.contract import Kernel, dtype_name, falls_back, plain
from forge_kernels.ops.cpp.build import missing

SOURCE = Path(__file__).with_suffix(".cpp")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

torch.library.define("forge::all_finite", "(Tensor[] tensors) -> Tensor")


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return a bool tensor: whether no entry of these tensors is NaN or infinite. True for an empty list."""
    if isinstance(tensors, Tensor):
        raise KernelError("forge.kernels.all_finite takes a list of tensors; it got one tensor.")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise KernelError(f"forge.kernels.all_finite takes a list of tensors; it has a {type(tensor).__name__}.")
    if not tensors:
        return _yes()
    if falls_back("all_finite", supports(tensors)):
        return all_finite_reference(tensors)
    return torch.ops.forge.all_finite(list(tensors))


def all_finite_reference(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return _yes()
    return torch.stack([tensor.isfinite().all().to(tensors[0].device) for tensor in tensors]).all()


@torch.library.impl("forge::all_finite", "CompositeExplicitAutograd")
def _(tensors: list[Tensor]) -> Tensor:
    if falls_back("all_finite", missing(SOURCE)):
        return all_finite_reference(tensors)
    return torch.ops.forge.all_finite(tensors)  # the C++ has just replaced this function


@torch.library.register_fake("forge::all_finite")
def _(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.bool)


def supports(tensors: Sequence[Tensor]) -> str | None:
    if not plain(*tensors):
        return "it supports no torch.func, forward-mode differentiation or tensor subclasses"
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"it runs on the CPU, not on {tensor.device.type}"
        if tensor.layout is not torch.strided:
            return "it does not support sparse tensors"
        if tensor.dtype not in DTYPES:
            return f"it does not support {dtype_name(tensor.dtype)}"
    return None


def _yes() -> Tensor:
    return torch.ones((), dtype=torch.bool, device="cpu")


ALL_FINITE = Kernel(
    name="all_finite",
    function=all_finite,
    reference=all_finite_reference,
    supports=supports,
    tolerance=dict.fromkeys(DTYPES, 0.0),
)
