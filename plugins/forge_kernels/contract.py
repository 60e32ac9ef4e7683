"""Kernel: what a fast operator promises, in a form that tests, benchmarks and the plugin `kernels` can hold it to.

A kernel has a **reference** in plain torch, a **tolerance** per dtype, a function that says which arguments it
**supports**, the **cost** that nobody can go below, **cases** to measure it with, and what it **replaces**. Third
parties offer theirs under the entry point `forge.kernels`.

Arguments that make no sense (shapes that do not fit, labels of the wrong dtype) are refused with a `KernelError`,
whether the kernel or its reference would run. Arguments that make sense but are not supported go to the reference, and
forge says so once.
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
from torch.autograd import forward_ad

from forge.errors import KernelError

logger = logging.getLogger("forge")

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, on the CPU too: for tests, and very slow."""

AnyTensor = TypeVar("AnyTensor", Tensor, Tensor | None)

PLAIN = (Tensor, nn.Parameter)
HALF_TO_FULL = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that most kernels compute in; all of them accumulate in float32."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The least that must be done: floating-point operations, and bytes with every input read and every output written
    once. Forward and backward together, where there is a backward."""

    flops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments to measure a kernel with."""

    name: str
    "Its shape, as a table would name it: 16384×4096."
    make: Callable[[torch.device, torch.dtype], tuple[Any, ...]]
    "New random arguments; those that are trained require gradients."
    options: Mapping[str, Any] = field(default_factory=dict)
    "Keyword arguments beside them."


@dataclass(frozen=True, slots=True)
class Functional:
    """A function that the kernel can stand in for, such as `torch.nn.functional.layer_norm`."""

    target: str
    "Its full name. It is replaced where it is defined, so that `F.layer_norm` and `nn.LayerNorm` both find it."
    call: Callable[..., Any]
    "call(original, *args, **kwargs): the kernel on these arguments, or original(...) where it does not fit."


@dataclass(frozen=True, slots=True)
class Module:
    """A module class that the kernel can stand in for."""

    target: str
    "The full name of the class."
    swap: Callable[[nn.Module], nn.Module | None]
    "The module that takes its place, with the very same parameters; None where it does not fit."


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One operator and its promises."""

    name: str
    summary: str
    "One line: what it computes."
    function: Callable[..., Any]
    "What users call. It runs the kernel where it is supported, and the reference elsewhere."
    reference: Callable[..., Any]
    "The same in plain torch, with the same arguments."
    supports: Callable[..., str | None]
    "Given the arguments: why the kernel cannot run on them, or None."
    tolerance: Mapping[torch.dtype, float]
    "By dtype, how far results and gradients may be from the reference in float64: norm of the difference over norm."
    cost: Callable[..., Cost]
    "Given the arguments: the least work, forward and backward."
    cases: tuple[Case, ...]
    replaces: tuple[Functional | Module, ...] = ()


# -- for the functions that users call --------------------------------------------------------------------------------


def triton_module(name: str) -> Any:
    """The module `forge_kernels.triton.NAME` with the operators written in Triton; None where Triton is not there."""
    return importlib.import_module(f"forge_kernels.triton.{name}") if HAS_TRITON else None


def unusable(*tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = HALF_TO_FULL) -> str | None:
    """Why no Triton kernel can run on these tensors; None where one can."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if transformed():
        return "it knows nothing of torch.func and of forward-mode differentiation"
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type != "cuda" and not (INTERPRETED and tensor.device.type == "cpu"):
            return f"it runs on CUDA, not on {tensor.device.type}"
        if tensor.dtype not in dtypes:
            return f"it has no {dtype_name(tensor.dtype)}"
    return None


def plain(*values: Any) -> bool:
    """Whether a kernel may stand in for torch's own function on these without anybody noticing: tensors of torch's own
    classes (or no tensors), outside of functorch's transforms and of forward-mode differentiation."""
    return not transformed() and all(type(value) in PLAIN for value in values if isinstance(value, Tensor))


def transformed() -> bool:
    """Whether functorch's transforms (torch.func) or forward-mode differentiation are at work, which would take what a
    kernel computes for a constant."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Around a launch: Triton takes the current device and its stream, which need not be the tensor's."""
    return torch.cuda.device_of(tensor) if tensor.is_cuda else nullcontext()


def as_autocast(x: AnyTensor) -> AnyTensor:
    """The tensor in autocast's dtype where autocast is on and would cast it; as it is elsewhere."""
    if (
        x is None
        or x.dtype not in HALF_TO_FULL
        or x.device.type == "meta"
        or not torch.is_autocast_enabled(x.device.type)
    ):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def check_floating(name: str, **tensors: Tensor | None) -> None:
    """Refuse numbers that nothing can be computed from as it is meant: integers, booleans, complex numbers."""
    for key, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise KernelError(
                f"forge.kernels.{name} needs floating-point tensors; {key} is {dtype_name(tensor.dtype)}: convert it."
            )


def refuse_second_derivative(name: str) -> None:
    """In a backward that cannot be differentiated again: an error where that is asked for, not a wrong gradient."""
    if torch.is_grad_enabled():
        raise KernelError(
            f"forge.kernels.{name} can be differentiated once: its backward was run with create_graph=True. Use plain "
            "torch there (leave the kernel out: kernels.leave_out)."
        )


_told: set[tuple[str, str]] = set()


def falls_back(name: str, reason: str | None) -> bool:
    """Whether the reference must run, for this reason; says so once."""
    if reason is None:
        return False
    if not torch.compiler.is_compiling() and (name, reason) not in _told:
        _told.add((name, reason))
        logger.info("forge.kernels.%s runs as plain torch: %s.", name, reason)
    return True


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")
