"""mlp against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_kernels.ops.mlp import MLP, mlp, mlp_reference
from tests.support.kernel_kit import (
    DEVICE,
    check_against_reference,
    distance,
    few,
    in_float64,
)

sizes = st.integers(1, 90)


def arguments(*rows, width=20, hidden=40, out=24, dtype=torch.float16, biases=(True, True)):
    def new(*shape, scale=1.0):
        return (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_()

    b1 = new(hidden) if biases[0] else None
    b2 = new(out) if biases[1] else None
    return [new(*rows, width), new(hidden, width, scale=0.3), b1, new(out, hidden, scale=0.3), b2]


@few
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    width=sizes,
    hidden=sizes,
    out=sizes,
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    biases=st.tuples(st.booleans(), st.booleans()),
    activation=st.sampled_from([None, "gelu", "gelu_erf", "relu", "silu"]),
)
def test_any_shape_and_dtype_equals_the_reference(rows, width, hidden, out, dtype, biases, activation):
    torch.manual_seed(width * hidden * out)
    args = arguments(*rows, width=width, hidden=hidden, out=out, dtype=dtype, biases=biases)
    check_against_reference(MLP, args, {"activation": activation})


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["gelu", pytest.param("gelu_erf", marks=pytest.mark.slow)])
def test_several_tiles_equal_the_reference(activation):
    torch.manual_seed(0)
    args = arguments(140, width=72, hidden=264, out=24, dtype=torch.bfloat16)
    check_against_reference(MLP, args, {"activation": activation})


@pytest.mark.parametrize("empty", ["rows", "width", "hidden", "out"])
def test_an_empty_one_is_as_in_torch(empty):
    torch.manual_seed(0)
    size = {"rows": 4, "width": 5, "hidden": 6, "out": 7, empty: 0}
    args = arguments(size["rows"], width=size["width"], hidden=size["hidden"], out=size["out"])
    check_against_reference(MLP, args)


def test_without_gradients_nothing_for_a_backward_is_written(monkeypatch):
    from forge_kernels.triton import mlp as triton_mlp

    modes = []

    def noted(a, b, bias, kind, mode="value", pre=None):
        modes.append(mode)
        return product(a, b, bias, kind, mode, pre)

    product = triton_mlp.product
    monkeypatch.setattr(triton_mlp, "product", noted)
    args = arguments(12)
    with torch.no_grad():
        result = mlp(*args)
    assert modes == ["value"]
    assert not result.requires_grad
    assert distance(result, mlp_reference(*in_float64(args)).detach()) < MLP.tolerance[torch.float16]


@pytest.mark.parametrize("activation", ["gelu", "gelu_erf", "relu", "silu"])
def test_infinite_and_large_values_are_as_in_torch(activation):
    x = torch.tensor([[float("inf")], [1e4], [-1e4], [float("nan")], [0.0]], device=DEVICE).bfloat16()
    one = torch.ones(1, 1, device=DEVICE, dtype=torch.bfloat16)
    right = mlp_reference(*in_float64([x, one, None, one, None]), activation=activation).bfloat16()
    torch.testing.assert_close(mlp(x, one, None, one, None, activation), right, equal_nan=True)
