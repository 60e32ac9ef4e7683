"""softmax against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from forge_kernels.ops.softmax import SOFTMAX, softmax, stand_in
from tests.support.kernel_kit import (
    DEVICE,
    check_against_reference,
    few,
)

INF = float("inf")
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
shapes = st.tuples(st.lists(st.integers(0, 9), max_size=2), st.integers(1, 70)).map(lambda s: (*s[0], s[1]))


def leaf(shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_()


@few
@given(shape=shapes, dtype=dtypes, scale=st.sampled_from([0.1, 1.0]))
def test_any_shape_and_dtype_equals_the_reference(shape, dtype, scale):
    check_against_reference(SOFTMAX, [leaf(shape, dtype, scale)])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in Triton's interpreter
def test_infinite_and_nan_entries_are_as_in_torch():
    x = torch.randn(7, 40, device=DEVICE)
    x[1] = -INF
    x[2, 3] = INF
    x[3, :38] = -INF
    x[4, 5] = float("nan")
    x[5, 2:] = -INF
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1), equal_nan=True)


def test_the_result_can_have_another_dtype():
    x = leaf((3, 20), torch.bfloat16)
    assert softmax(x, dtype=torch.float32).dtype == torch.float32
    check_against_reference(SOFTMAX, [x, -1, torch.float32])


def test_a_dimension_that_is_not_the_last_goes_to_torch():
    x = leaf((3, 4, 5))
    assert SOFTMAX.supports(x, 1) == "it supports the last dimension only"
    torch.testing.assert_close(softmax(x, 1), torch.softmax(x, 1))
    torch.testing.assert_close(softmax(x, 2), torch.softmax(x, 2))


def test_it_stands_in_for_the_functional_of_torch():
    called = []
    assert SOFTMAX.replaces == {"torch.nn.functional.softmax": stand_in}

    def original(*args):
        called.append(args)
        return F.softmax(*args)

    x = leaf((3, 8), torch.bfloat16).detach()
    torch.testing.assert_close(stand_in(original, x, -1), F.softmax(x, -1))
    torch.testing.assert_close(stand_in(original, x, dim=1, dtype=torch.float32), F.softmax(x, 1, dtype=torch.float32))
    with torch.autocast(DEVICE, torch.bfloat16):
        assert stand_in(original, x, -1).dtype == F.softmax(x, -1).dtype
    assert not called, "the kernel fits"
    torch.testing.assert_close(stand_in(original, x, 0), F.softmax(x, 0))
    torch.testing.assert_close(stand_in(original, x, -1, dtype=torch.float64), F.softmax(x, -1, dtype=torch.float64))
    assert len(called) == 2
