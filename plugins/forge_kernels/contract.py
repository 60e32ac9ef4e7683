"""Kernel: the contract of a fast operator, which tests and the plugin `kernels` rely on.

A kernel has a **reference** in plain torch, a **tolerance** per dtype, a function that returns which arguments it
**supports**, and the functions of torch that it **replaces**. Third parties register theirs under the entry point
`forge.kernels`.

Invalid arguments (shapes that do not match, labels of the wrong dtype) raise a `KernelError`, whether the kernel or its
reference would run. Valid but unsupported arguments go to the reference, with one log message per reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from forge.errors import KernelError
from forge_kernels.torch_internals import is_transformed

logger = logging.getLogger("forge")

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, also on the CPU: very slow, for tests."""

AnyTensor = TypeVar("AnyTensor", Tensor, Tensor | None)

PLAIN = (Tensor, nn.Parameter)
HALF_TO_FULL = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of most kernels; all accumulate in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One operator and its contract."""

    name: str
    function: Callable[..., Any]
    "The public function. It runs the kernel where supported, and the reference elsewhere."
    reference: Callable[..., Any]
    "The same computation in plain torch, with the same arguments."
    supports: Callable[..., str | None]
    "Given the arguments, returns why the kernel cannot run on them, or None."
    tolerance: Mapping[torch.dtype, float]
    "Allowed error of results and gradients by dtype: norm of the difference to the float64 reference over its norm."
    replaces: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions of torch, by full name, and what runs in the place of each: call(original, *args, **options) runs the
    kernel, or the original for arguments that the kernel does not support. A function is replaced where it is defined,
    so that `F.layer_norm` and `nn.LayerNorm` both find the kernel."""


# -- helpers for public functions ------------------------------------------------------------------------------------


def triton_module(name: str) -> Any:
    """Import `forge_kernels.triton.NAME` with the Triton operators; None without Triton."""
    return importlib.import_module(f"forge_kernels.triton.{name}") if HAS_TRITON else None


def unusable(*tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = HALF_TO_FULL) -> str | None:
    """Return why no Triton kernel can run on these tensors, or None."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if is_transformed():
        return "it supports neither torch.func nor forward-mode differentiation"
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type != "cuda" and not (INTERPRETED and tensor.device.type == "cpu"):
            return f"it runs on CUDA, not on {tensor.device.type}"
        if tensor.dtype not in dtypes:
            return f"it does not support {dtype_name(tensor.dtype)}"
    return None


def plain(*values: Any) -> bool:
    """Whether a kernel can replace torch's own function on these values: no tensor subclasses, and no functorch
    transform or forward-mode differentiation, which would treat a kernel's result as a constant."""
    return not is_transformed() and all(type(value) in PLAIN for value in values if isinstance(value, Tensor))


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make a tensor's device current for a launch, since Triton launches on the current device and stream."""
    return torch.cuda.device_of(tensor) if tensor.is_cuda else nullcontext()


def as_autocast(x: AnyTensor) -> AnyTensor:
    """Cast to autocast's dtype if autocast is on and would cast the tensor, else return it unchanged."""
    if (
        x is None
        or x.dtype not in HALF_TO_FULL
        or x.device.type == "meta"
        or not torch.is_autocast_enabled(x.device.type)
    ):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def check_floating(name: str, **tensors: Tensor | None) -> None:
    """Raise KernelError for integer, boolean and complex tensors."""
    for key, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise KernelError(
                f"forge.kernels.{name} needs floating-point tensors; {key} is {dtype_name(tensor.dtype)}: convert it."
            )


def refuse_second_derivative(name: str) -> None:
    """Raise KernelError in a backward run with create_graph=True: the second derivative would be wrong."""
    if torch.is_grad_enabled():
        raise KernelError(
            f"forge.kernels.{name} can be differentiated once, and its backward ran with create_graph=True. Use "
            "plain torch there; the plugin kernels swaps in only what kernels.use names."
        )


_logged: set[tuple[str, str]] = set()


def falls_back(name: str, reason: str | None) -> bool:
    """Return whether a reason to run the reference exists; log each reason once."""
    if reason is None:
        return False
    if not torch.compiler.is_compiling() and (name, reason) not in _logged:
        _logged.add((name, reason))
        logger.info("forge.kernels.%s runs as plain torch: %s.", name, reason)
    return True


def dtype_name(dtype: torch.dtype) -> str:
    """Return float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")
