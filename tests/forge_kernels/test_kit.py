"""forge.testing holds a kernel to its promises: a third party's right one passes, and wrong ones do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

from forge.testing import check_against_reference, check_compiles_whole, poisoned_memory
from tests.support.profiles import some
from tests.support.toy_kernels import TOY

DTYPES = list(TOY.tolerance)


def argument(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 3).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", some(DTYPES, quick=1))
def test_a_third_partys_kernel_passes(dtype):
    check_against_reference(TOY, [argument(dtype)])
    check_compiles_whole(TOY, [argument(dtype)])


class WrongSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * 0.4


class Unwritten(torch.autograd.Function):
    """It leaves out the last row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:-1] = x[:-1] / 2
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * 0.5


WRONG = {
    "is off by": lambda x: x * 0.5001,
    "result 1 is off by": WrongSlope.apply,
    "should be finite are not": Unwritten.apply,
    "the reference gives": lambda x: (x * 0.5).double(),
}


@pytest.mark.parametrize(("message", "function"), WRONG.items(), ids=["value", "gradient", "memory", "dtype"])
def test_a_wrong_kernel_fails(message, function):
    wrong = replace(TOY, function=function, tolerance={**TOY.tolerance, torch.float64: 0.0})
    with pytest.raises(AssertionError, match=message):
        check_against_reference(wrong, [argument()])


def test_a_kernel_is_not_held_against_itself():
    with pytest.raises(AssertionError, match="the reference would test itself"):
        check_against_reference(TOY, [torch.arange(3)])


def test_a_graph_break_fails():
    def breaking(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 0.5

    with pytest.raises(Unsupported):
        check_compiles_whole(replace(TOY, function=breaking), [argument()])


def test_a_function_that_differs_when_compiled_fails():
    def two_faced(x: Tensor) -> Tensor:
        return x * (0.4 if torch.compiler.is_compiling() else 0.5)

    with pytest.raises(AssertionError, match="not close"):
        check_compiles_whole(replace(TOY, function=two_faced), [argument()])


def test_new_memory_is_nan_and_settings_come_back():
    memory: Any = torch.utils.deterministic

    def settings() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory

    @poisoned_memory()
    def fail() -> None:
        assert torch.empty(3).isnan().all()
        raise RuntimeError("stop")

    before = settings()
    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert settings() == before
