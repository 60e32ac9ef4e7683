"""What holds for every kernel: torch.compile, derivatives, transforms, devices, and arguments that make no sense."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge.errors import KernelError
from forge_kernels.contract import INTERPRETED, Kernel
from forge_kernels.ops.attention import ATTENTION
from forge_kernels.ops.cross_entropy import CROSS_ENTROPY
from forge_kernels.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from forge_kernels.ops.matmul import MATMUL
from forge_kernels.ops.mlp import MLP
from forge_kernels.ops.norms import LAYER_NORM, RMS_NORM
from forge_kernels.ops.softmax import SOFTMAX
from forge_kernels.triton.attention import attention, attention_backward
from forge_kernels.triton.cross_entropy import cross_entropy, scale_
from forge_kernels.triton.linear_cross_entropy import linear_cross_entropy
from forge_kernels.triton.matmul import matmul
from forge_kernels.triton.mlp import first, hidden_grad
from forge_kernels.triton.norms import norm
from forge_kernels.triton.softmax import softmax
from tests.support.kernel_kit import (
    DEVICE,
    check_compiles_whole,
    check_stand_in_compiles_whole,
    check_transformed,
    every_transform,
    run,
)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def classes(rows: int, count: int) -> Tensor:
    return torch.randint(count, (rows,), device=DEVICE)


def heads(size: int = 18) -> tuple[Tensor, ...]:
    return leaf(1, 4, 20, size), leaf(1, 2, 24, size), leaf(1, 2, 24, size)


def layers() -> tuple[Tensor, ...]:
    shapes = ((3, 8), (12, 8), (12,), (4, 12), (4,))
    return tuple(leaf(*shape, dtype=torch.float16) for shape in shapes)


ARGUMENTS: dict[str, tuple[Kernel, Callable[[], tuple[Any, ...]]]] = {
    "softmax": (SOFTMAX, lambda: (leaf(3, 10),)),
    "rms_norm": (RMS_NORM, lambda: (leaf(3, 8), leaf(8))),
    "layer_norm": (LAYER_NORM, lambda: (leaf(3, 8), leaf(8), leaf(8))),
    "attention": (ATTENTION, heads),
    "cross_entropy": (CROSS_ENTROPY, lambda: (leaf(4, 30), classes(4, 30))),
    "linear_cross_entropy": (LINEAR_CROSS_ENTROPY, lambda: (leaf(6, 10), leaf(50, 10), classes(6, 50))),
    "matmul": (MATMUL, lambda: (leaf(3, 6, 5), leaf(5, 4), leaf(4))),
    "mlp": (MLP, layers),
}
every_kernel = pytest.mark.parametrize(("kernel", "make"), ARGUMENTS.values(), ids=ARGUMENTS)

STAND_INS: dict[str, tuple[Kernel, Any, Callable[[], tuple[Any, ...]]]] = {
    "softmax": (SOFTMAX, F.softmax, lambda: (leaf(3, 8, dtype=torch.bfloat16), -1)),
    "rms_norm": (RMS_NORM, F.rms_norm, lambda: (leaf(3, 8), (8,), leaf(8))),
    "layer_norm": (LAYER_NORM, F.layer_norm, lambda: (leaf(3, 8), (8,), leaf(8))),
    "attention": (ATTENTION, F.scaled_dot_product_attention, lambda: (leaf(1, 2, 10, 16),) * 3),
    "cross_entropy": (CROSS_ENTROPY, F.cross_entropy, lambda: (leaf(4, 30), classes(4, 30))),
}
every_stand_in = pytest.mark.parametrize(("kernel", "original", "make"), STAND_INS.values(), ids=STAND_INS)


def stand_in_of(kernel: Kernel) -> Callable[..., Any]:
    (call,) = kernel.replaces.values()
    return call


@pytest.mark.slow
@every_kernel
def test_it_compiles_whole(kernel: Kernel, make: Any) -> None:
    check_compiles_whole(kernel, make())


@pytest.mark.slow
@every_stand_in
def test_a_stand_in_compiles_whole(kernel: Kernel, original: Any, make: Any) -> None:
    check_stand_in_compiles_whole(stand_in_of(kernel), *make())


@pytest.mark.slow
def test_the_operators_are_registered_as_torch_asks() -> None:
    q, k, v = (x.detach() for x in heads(16))
    out, lse = attention(q, k, v, True, 0.25)
    x, w1, b1, w2, _ = layers()
    logits, target = leaf(3, 20), classes(3, 20)
    registered: list[tuple[Any, tuple[Any, ...]]] = [
        (softmax, (leaf(3, 5), torch.float32)),
        (norm, (leaf(3, 5), leaf(5), leaf(5), 1e-5, True, torch.float32)),
        (norm, (leaf(3, 5), leaf(5), None, 1e-5, False, torch.bfloat16)),
        (attention, (*heads(16), True, 0.25)),
        (attention_backward, (torch.randn_like(out), q, k, v, out, lse, True, 0.25)),
        (cross_entropy, (logits.detach(), torch.empty_like(logits), target, -100, 0.0, 0.1, True)),
        (scale_, (logits.detach(), torch.tensor(2.0, device=DEVICE))),
        (linear_cross_entropy, (leaf(3, 6), leaf(20, 6), leaf(20), target, -100, 0.0, 0.0, True, 2, [True] * 3)),
        (matmul, (leaf(3, 5), leaf(5, 4), leaf(4))),
        (first, (x, w1, b1, "gelu", True)),
        (first, (x.detach(), w1.detach(), b1.detach(), "gelu", False)),
        (hidden_grad, (leaf(3, 4, dtype=torch.float16).detach(), w2.detach(), x.detach() @ w1.detach().t(), "gelu")),
    ]
    for operator, args in registered:
        torch.library.opcheck(operator, args)


@every_kernel
def test_a_second_derivative_is_an_error_or_right(kernel: Kernel, make: Any) -> None:
    x, *rest = make()

    def second(function: Callable[..., Any]) -> Tensor:
        (slope,) = torch.autograd.grad(function(x, *rest).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    if kernel is MATMUL:  # its backward is torch's own products
        torch.testing.assert_close(second(kernel.function), second(kernel.reference), rtol=1e-4, atol=1e-4)
        return
    with pytest.raises((RuntimeError, KernelError), match=r"no autograd formula was registered|differentiated once"):
        second(kernel.function)


@every_transform
@every_kernel
def test_transforms_run_as_plain_torch(kernel: Kernel, make: Any, transform: Any) -> None:
    x, *rest = (arg.detach() for arg in make())
    with sdpa_kernel(SDPBackend.MATH):  # the only one of torch's that has forward mode
        check_transformed(transform, lambda x: kernel.function(x, *rest), lambda x: kernel.reference(x, *rest), x)


@every_transform
@every_stand_in
def test_transforms_of_a_stand_in_are_those_of_torch(kernel: Kernel, original: Any, make: Any, transform: Any) -> None:
    x, *rest = make()
    stand_in, x = stand_in_of(kernel), x.detach()
    with sdpa_kernel(SDPBackend.MATH):
        check_transformed(transform, lambda x: stand_in(original, x, *rest), lambda x: original(x, *rest), x)


@every_kernel
def test_every_launch_is_on_the_device_of_its_tensors(
    kernel: Kernel, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    within: list[Tensor] = []
    launches: list[bool] = []
    owner, name = (GridExecutor, "__call__") if INTERPRETED else (JITFunction, "run")
    launch = getattr(owner, name)

    @contextmanager
    def noted_device(tensor: Tensor) -> Iterator[None]:
        within.append(tensor)
        yield
        within.pop()

    def noted_launch(*args: Any, **options: Any) -> Any:
        launches.append(bool(within))
        return launch(*args, **options)

    for module in [module for path, module in sys.modules.items() if path.startswith("forge_kernels.triton.")]:
        if hasattr(module, "device_of"):
            monkeypatch.setattr(module, "device_of", noted_device)
    monkeypatch.setattr(owner, name, noted_launch)
    run(kernel.function, make(), {})
    assert launches
    assert all(launches)


@every_kernel
def test_what_is_not_floating_point_is_refused(kernel: Kernel, make: Any) -> None:
    args = make()
    for dtype in (torch.int64, torch.bool, torch.complex64):
        wrong = [arg.detach().to(dtype) if arg.is_floating_point() else arg for arg in args]
        with pytest.raises(KernelError, match=r"floating-point"):
            kernel.function(*wrong)


@pytest.mark.parametrize("device", [DEVICE, "meta"])  # where the kernel would run, and where the reference would
@pytest.mark.parametrize("name", ["matmul", "mlp", "attention"])
def test_dtypes_that_differ_are_refused(name: str, device: str) -> None:
    kernel, make = ARGUMENTS[name]
    x, *rest = (arg.detach().to(device) for arg in make())
    with pytest.raises(KernelError, match=r"(one|same) dtype"):
        kernel.function(x.bfloat16(), *rest)
