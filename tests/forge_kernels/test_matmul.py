"""matmul against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_kernels.ops.matmul import MATMUL
from tests.support.kernel_kit import (
    DEVICE,
    check_against_reference,
    few,
)

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def new(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_()


@few
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    depth=st.integers(1, 150),
    columns=st.integers(1, 150),
    dtype=dtypes,
    bias=st.booleans(),
)
def test_any_shape_and_dtype_equals_the_reference(rows, depth, columns, dtype, bias):
    torch.manual_seed(depth * columns)
    args = [new(*rows, depth, dtype=dtype), new(depth, columns, dtype=dtype, scale=depth**-0.5)]
    args += [new(columns, dtype=dtype)] if bias else []
    check_against_reference(MATMUL, args)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [pytest.param((1040, 70, 130), marks=pytest.mark.slow), (5, 200, 520)])
def test_several_tiles_and_steps_equal_the_reference(shape):
    rows, depth, columns = shape
    args = [new(rows, depth, dtype=torch.bfloat16), new(depth, columns, dtype=torch.bfloat16, scale=depth**-0.5)]
    check_against_reference(MATMUL, [*args, new(columns, dtype=torch.bfloat16)])


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_an_empty_product_is_as_in_torch(rows, depth, columns):
    check_against_reference(MATMUL, [new(rows, depth), new(depth, columns), new(columns)])
