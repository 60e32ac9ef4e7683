"""matmul against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import KernelError
from forge.kernels.ops.matmul import ACTIVATIONS, MATMUL, matmul, matmul_reference
from tests.kernel_kit import DEVICE, check_against_reference, check_compiles_whole, distance, run

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
activations = st.sampled_from(list(ACTIVATIONS))


def new(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_()


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    depth=st.integers(1, 150),
    columns=st.integers(8, 150),
    dtype=dtypes,
    activation=activations,
    bias=st.booleans(),
)
def test_any_shape_dtype_and_activation_equals_the_reference(rows, depth, columns, dtype, activation, bias):
    torch.manual_seed(depth * columns)
    args = [new(*rows, depth, dtype=dtype), new(depth, columns, dtype=dtype, scale=depth**-0.5)]
    args += [new(columns, dtype=dtype)] if bias else []
    few = 4 * MATMUL.tolerance[dtype]  # the slope is taken at a rounded value, which shows where there are few elements
    check_against_reference(MATMUL, args, {"activation": activation}, few)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    layouts=st.tuples(*[st.sampled_from(["rows", "columns", "part of a larger one", "spread"])] * 2),
    sizes=st.tuples(*[st.sampled_from([8, 16, 21, 64])] * 3),
)
def test_strides_do_not_matter(dtype, layouts, sizes):
    rows, depth, columns = sizes
    torch.manual_seed(rows * depth * columns)

    def laid_out(shape, layout):
        if layout == "columns":
            return torch.randn(shape[1], shape[0], device=DEVICE).to(dtype).t()
        if layout == "part of a larger one":
            return torch.randn(shape[0] + 3, shape[1] + 8, device=DEVICE).to(dtype)[3:, 8:]
        if layout == "spread":
            return torch.randn(shape[0], shape[1], 2, device=DEVICE).to(dtype)[..., 1]
        return torch.randn(shape, device=DEVICE).to(dtype)

    a = laid_out((rows, depth), layouts[0]).detach().requires_grad_()
    b = laid_out((depth, columns), layouts[1]).detach().requires_grad_()
    check_against_reference(
        MATMUL, [a, b, new(columns, dtype=dtype)], {"activation": "gelu"}, 4 * MATMUL.tolerance[dtype]
    )


@pytest.mark.parametrize("shape", [(1040, 70, 130), (5, 200, 520)])
def test_several_tiles_and_steps_equal_the_reference(shape):
    rows, depth, columns = shape
    args = [new(rows, depth, dtype=torch.bfloat16), new(depth, columns, dtype=torch.bfloat16, scale=depth**-0.5)]
    check_against_reference(MATMUL, [*args, new(columns, dtype=torch.bfloat16)], {"activation": "silu"})


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_an_empty_product_is_as_in_torch(rows, depth, columns):
    check_against_reference(MATMUL, [new(rows, depth), new(depth, columns), new(columns)], {"activation": "gelu"})


@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 1, 1), (1, 50, 40), (40, 50, 1), (40, 1, 30)])
def test_one_row_column_or_step_is_enough(rows, depth, columns):
    torch.manual_seed(0)
    check_against_reference(MATMUL, [new(rows, depth), new(depth, columns)], {"activation": "silu"})


def test_a_vector_times_a_matrix_is_a_vector():
    check_against_reference(MATMUL, [new(20), new(20, 7)])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinite_and_large_values_are_as_in_torch(activation):
    a = torch.tensor([[float("inf")], [1e4], [-1e4], [float("nan")], [0.0]], device=DEVICE)
    b = torch.ones(1, 3, device=DEVICE)
    result = matmul(a, b, activation=activation)
    torch.testing.assert_close(
        result, matmul_reference(a.double(), b.double(), activation=activation).float(), equal_nan=True
    )


def test_rows_do_not_mix_when_one_is_not_finite():
    a = torch.randn(20, 24, device=DEVICE)
    a[3] = float("nan")
    b = torch.randn(24, 11, device=DEVICE)
    assert torch.isfinite(matmul(a, b)).all(1).tolist() == [row != 3 for row in range(20)]


def test_float32_is_multiplied_in_full_precision():
    a, b = new(40, 100), new(100, 30)
    exact = (a.double() @ b.double()).detach()
    assert distance(matmul(a, b).detach(), exact) < 1e-6


def test_only_the_gradients_that_are_asked_for_are_computed():
    a, b, bias = new(6, 5), new(5, 4).detach(), new(4)
    result = matmul(a, b, bias, "gelu")
    torch.testing.assert_close(result, matmul_reference(a, b, bias, "gelu"))
    (only,) = torch.autograd.grad(result.sum(), [bias], retain_graph=True)
    (right,) = torch.autograd.grad(matmul_reference(a, b, bias, "gelu").sum(), [bias])
    torch.testing.assert_close(only, right)


def test_the_gradient_of_a_transposed_weight_has_the_layout_of_the_weight():
    weight = new(8, 5)
    (grad,) = torch.autograd.grad(matmul(new(6, 5), weight.t()).sum(), [weight])
    assert grad.stride() == weight.stride()


def test_under_autocast_arguments_are_cast_and_gradients_come_in_their_dtype():
    args = [new(12, 20), new(20, 16), new(16)]
    with torch.autocast(DEVICE, torch.bfloat16):
        results = run(matmul, args, {"activation": "gelu"})
        exact = run(matmul_reference, args, {"activation": "gelu"})
    assert [result.dtype for result in results] == [torch.bfloat16] + [torch.float32] * 3
    for result, right in zip(results, exact, strict=True):
        assert distance(result, right) < 2e-2


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_compiles_whole(activation):
    check_compiles_whole(MATMUL, [new(3, 10, 20), new(20, 6), new(6)], {"activation": activation})


@pytest.mark.parametrize(("kind", "keep"), [("none", False), ("gelu", True)])
def test_the_operators_are_registered_as_torch_asks(kind, keep):
    from forge.kernels.triton.matmul import activation_grad
    from forge.kernels.triton.matmul import matmul as op

    torch.library.opcheck(op, (new(3, 5), new(5, 4), new(4), kind, keep))
    torch.library.opcheck(activation_grad, (new(3, 5).detach(), new(3, 5).detach(), "gelu"))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(KernelError, match=r"\(\.\.\., K\).*\(3, 5\), \(4, 5\) and None"):
        matmul(torch.ones(3, 5, device=DEVICE), torch.ones(4, 5, device=DEVICE))
    with pytest.raises(KernelError, match=r"bias of \(N,\).*\(3,\)"):
        matmul(torch.ones(3, 5, device=DEVICE), torch.ones(5, 4, device=DEVICE), torch.ones(3, device=DEVICE))


def test_dtypes_that_differ_are_refused():
    with pytest.raises(KernelError, match=r"one dtype.*a torch.float32.*b torch.float16"):
        matmul(torch.ones(3, 5, device=DEVICE), torch.ones(5, 4, device=DEVICE, dtype=torch.float16))


def test_an_unknown_activation_is_refused():
    with pytest.raises(KernelError, match=r"no activation 'swish'.*gelu, gelu_erf, relu, silu"):
        matmul(torch.ones(3, 5, device=DEVICE), torch.ones(5, 4, device=DEVICE), activation="swish")


def test_float64_goes_to_plain_torch():
    a, b = new(3, 5).double(), new(5, 4).double()
    assert torch.equal(matmul(a, b, activation="relu"), torch.relu(a @ b))
