"""gradcheck: right functions pass, and wrong ones are named with the entry that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.testing import gradcheck


class Product(torch.autograd.Function):
    """x * y, with a factor in the gradient by y that a test sets."""

    factor = 1.0
    detached = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * (y.detach() if cls.detached else y), grad * x * cls.factor


class Wrong(Product):
    factor = 1.5


class Detached(Product):
    detached = True


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def pair() -> tuple[Tensor, Tensor]:
    return torch.tensor([[1.0, -2.0], [3.0, 0.5]]), torch.tensor([[2.0, 1.0], [7.0, -1.0]])


def test_a_right_function_passes_and_inputs_stay() -> None:
    x, y = pair()
    gradcheck(Product, x, y)
    gradcheck(torch.nn.functional.linear, x, y)
    assert not x.requires_grad
    assert x.dtype == torch.float32


def test_the_wrong_input_and_its_entry_are_named() -> None:
    x, y = pair()
    with pytest.raises(AssertionError) as caught:
        gradcheck(Wrong, x, y)
    text = str(caught.value)
    assert "The gradient by 'y' is wrong" in text
    assert "doutput[1, 0] by dy[1, 0] is 4.5 by backward, and 3 by finite differences" in text


def test_a_wrong_second_derivative_is_named() -> None:
    x, y = pair()
    gradcheck(Detached, x, y, second=False)
    with pytest.raises(AssertionError, match=r"second derivative by '[xy]' is wrong.*Pass second=False"):
        gradcheck(Detached, x, y)


def test_a_function_that_is_differentiable_once_says_so() -> None:
    gradcheck(Once, torch.randn(3), second=False)
    with pytest.raises(AssertionError, match="second=False"):
        gradcheck(Once, torch.randn(3))
