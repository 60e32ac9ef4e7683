"""Kernels of a third party, as small as they can be: plain torch, with a count of what they were called with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

import torch
from torch import Tensor

from forge_kernels.contract import Kernel

CALLS: list[tuple[str, tuple[int, ...]]] = []
"""(kernel, shape) of every call that a toy ran."""


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


def _fail(original: Any, *args: Any, **options: Any) -> Any:
    raise RuntimeError("no such instruction")


def _linear(original: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    CALLS.append(("toy_linear", tuple(input.shape)))
    return original(input, weight, bias)


def toy(name: str, **replaces: Callable[..., Any]) -> Kernel:
    """A kernel that halves, and replaces functions of torch.nn.functional."""
    return Kernel(
        name=name,
        function=lambda x: x * 0.5,
        reference=lambda x: x / 2,
        supports=lambda x: None if x.is_floating_point() else "it has no integers",
        tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-2},
        replaces={f"torch.nn.functional.{target}": call for target, call in replaces.items()},
    )


TOY = toy("toy", relu=partial(_relu, "toy", 0.0))
TOY_RIVAL = toy("toy_rival", relu=partial(_relu, "toy_rival", 0.0))
TOY_WRONG = toy("toy_wrong", relu=partial(_relu, "toy_wrong", 1.0))
TOY_BROKEN = toy("toy_broken", relu=_fail)
TOY_LINEAR = toy("toy_linear", linear=_linear)
TOY_LOST = toy("toy_lost", relu_of_tomorrow=_fail)
TOY_BARE = toy("toy_bare")


def entries(*names: str, **others: str) -> dict[str, EntryPoint]:
    """What `forge.registry.installed("kernel")` would find: a toy by its name, or `name="module:attribute"`."""
    values = {name: f"{__name__}:{name.upper()}" for name in names} | others
    return {name: EntryPoint(name, value, "forge.kernels") for name, value in sorted(values.items())}
