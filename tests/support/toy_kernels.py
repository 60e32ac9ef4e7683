"""Kernels of a third party, as small as they can be: plain torch, with a count of what they were called with."""

from __future__ import annotations

from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_kernels.contract import Case, Cost, Functional, Kernel

CALLS: list[tuple[str, tuple[int, ...]]] = []
"""(kernel, shape) of every call that a toy ran."""


def halve(x: Tensor) -> Tensor:
    return x * 0.5


def halve_reference(x: Tensor) -> Tensor:
    return x / 2


@torch.library.custom_op("forge_toys::relu", mutates_args=())
def relu(x: Tensor, name: str, extra: float) -> Tensor:
    """An operator, so that it counts what runs and not what torch.compile traces."""
    CALLS.append((name, tuple(x.shape)))
    return x.clamp(min=0) + extra


@relu.register_fake
def _(x: Tensor, name: str, extra: float) -> Tensor:
    return torch.empty_like(x)


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient * (context.saved_tensors[0] > 0), None, None


relu.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))


def _relu(name: str, extra: float, original: Any, input: Tensor, inplace: bool = False) -> Tensor:
    return original(input, inplace) if inplace else relu(input, name, extra)


def _hand_back(original: Any, *args: Any, **options: Any) -> Any:
    return original(*args, **options)


def _fail(original: Any, *args: Any, **options: Any) -> Any:
    raise RuntimeError("no such instruction")


LINEAR_ITSELF = F.linear


def _wide_linear(original: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.shape[0] <= 4:
        return original(input, weight, bias)
    CALLS.append(("toy_linear", tuple(input.shape)))
    return LINEAR_ITSELF(input, weight, bias)


def _make(rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(rows, 8, device=device, dtype=dtype, requires_grad=True),)


def toy(name: str, *replaces: Functional, summary: str = "half of x") -> Kernel:
    return Kernel(
        name=name,
        summary=summary,
        function=halve,
        reference=halve_reference,
        supports=lambda x: None if x.is_floating_point() else "it has no integers",
        tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-2},
        cost=lambda x: Cost(flops=2 * x.numel(), bytes=4 * x.numel() * x.itemsize),
        cases=(Case("4×8", partial(_make, 4)), Case("6×8", partial(_make, 6))),
        replaces=replaces,
    )


RELU = "torch.nn.functional.relu"
LINEAR = "torch.nn.functional.linear"

TOY = toy("toy", Functional(RELU, partial(_relu, "toy", 0.0)))
TOY_OPAQUE = toy("toy_opaque", Functional(RELU, partial(_relu, "toy_opaque", 0.0), fuses=False))
TOY_RIVAL = toy("toy_rival", Functional(RELU, partial(_relu, "toy_rival", 0.0)))
TOY_WRONG = toy("toy_wrong", Functional(RELU, partial(_relu, "toy_wrong", 1.0)))
TOY_FUSSY = toy("toy_fussy", Functional(RELU, _hand_back))
TOY_BROKEN = toy("toy_broken", Functional(RELU, _fail))
TOY_LINEAR = toy("toy_linear", Functional(LINEAR, _wide_linear))
TOY_LOST = toy("toy_lost", Functional("torch.nn.functional.relu_of_tomorrow", _hand_back))
TOY_BARE = toy("toy_bare")


def entries(*names: str, **others: str) -> dict[str, EntryPoint]:
    """What `forge.registry.installed("kernel")` would find: a toy by its name, or `name="module:attribute"`."""
    values = {name: f"{__name__}:{name.upper()}" for name in names} | others
    return {name: EntryPoint(name, value, "forge.kernels") for name, value in sorted(values.items())}
