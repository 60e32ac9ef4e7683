"""matmul against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from forge.errors import KernelError
from forge_kernels.ops.matmul import MATMUL, matmul, matmul_reference
from tests.support.kernel_kit import (
    DEVICE,
    check_against_reference,
    distance,
    few,
    in_float64,
    run,
)
from tests.support.profiles import some

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


@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], quick=1))
@few
@given(
    layouts=st.tuples(*[st.sampled_from(["rows", "columns", "part of a larger one", "spread"])] * 2),
    sizes=st.tuples(*[st.sampled_from([16, 21, 64])] * 3),
)
def test_strides_do_not_matter(dtype, layouts, sizes):
    rows, depth, columns = sizes
    torch.manual_seed(rows * depth * columns)

    def laid_out(shape, layout, scale=1.0):
        if layout == "columns":
            return new(shape[1], shape[0], dtype=dtype, scale=scale).t()
        if layout == "part of a larger one":
            return new(shape[0] + 3, shape[1] + 8, dtype=dtype, scale=scale)[3:, 8:]
        if layout == "spread":
            return new(shape[0], shape[1], 2, dtype=dtype, scale=scale)[..., 1]
        return new(*shape, dtype=dtype, scale=scale)

    a = laid_out((rows, depth), layouts[0]).detach().requires_grad_()
    b = laid_out((depth, columns), layouts[1], depth**-0.5).detach().requires_grad_()
    check_against_reference(MATMUL, [a, b, new(columns, dtype=dtype)])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [pytest.param((1040, 70, 130), marks=pytest.mark.slow), (5, 200, 520)])
def test_several_tiles_and_steps_equal_the_reference(shape):
    rows, depth, columns = shape
    args = [new(rows, depth, dtype=torch.bfloat16), new(depth, columns, dtype=torch.bfloat16, scale=depth**-0.5)]
    check_against_reference(MATMUL, [*args, new(columns, dtype=torch.bfloat16)])


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_an_empty_product_is_as_in_torch(rows, depth, columns):
    check_against_reference(MATMUL, [new(rows, depth), new(depth, columns), new(columns)])


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_gradients_that_are_asked_for_are_computed(wanted):
    args = [new(6, 5).detach(), new(5, 4).detach(), new(4).detach()]
    for place in wanted:
        args[place].requires_grad_()
    check_against_reference(MATMUL, args)
    result = matmul(*args).sum()
    with Products() as products:
        result.backward()
    assert products.count == len({0, 1} & set(wanted))
    assert [place for place, argument in enumerate(args) if argument.grad is not None] == list(wanted)


class Products(TorchDispatchMode):
    """Counts torch's matrix products meanwhile."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def test_autocast_casts_arguments_and_gradients_keep_dtypes():
    args = [new(12, 20), new(20, 16), new(16)]
    with torch.autocast(DEVICE, torch.bfloat16):
        results = run(matmul, args, {})
    rounded = [argument.detach().bfloat16().requires_grad_() for argument in args]
    exact = run(matmul_reference, in_float64(rounded), {})
    assert [result.dtype for result in results] == [torch.bfloat16] + [torch.float32] * 3
    for result, right in zip(results, exact, strict=True):
        assert distance(result, right) < MATMUL.tolerance[torch.bfloat16]


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(KernelError, match=r"\(\.\.\., K\).*\(3, 5\), \(4, 5\) and None"):
        matmul(torch.ones(3, 5, device=DEVICE), torch.ones(4, 5, device=DEVICE))
    with pytest.raises(KernelError, match=r"bias of \(N,\).*\(3,\)"):
        matmul(torch.ones(3, 5, device=DEVICE), torch.ones(5, 4, device=DEVICE), torch.ones(3, device=DEVICE))


def test_float64_goes_to_plain_torch():
    a, b = new(3, 5).double(), new(5, 4).double()
    assert torch.equal(matmul(a, b), a @ b)
