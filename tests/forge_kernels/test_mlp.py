"""mlp against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

from forge.errors import KernelError
from forge_kernels.ops.mlp import MLP, mlp, mlp_reference
from tests.support.kernel_kit import (
    DEVICE,
    check_against_reference,
    check_compiles_whole,
    distance,
    few,
    in_float64,
    run,
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


def test_strides_do_not_matter():
    torch.manual_seed(0)
    x, w1, b1, w2, b2 = (argument.detach() for argument in arguments(10, 6))
    args = [x.transpose(0, 1), w1.t().contiguous().t(), b1, torch.stack([w2, w2], 2)[..., 0], b2]
    check_against_reference(MLP, [argument.requires_grad_() for argument in args])


@pytest.mark.parametrize("empty", ["rows", "width", "hidden", "out"])
def test_an_empty_one_is_as_in_torch(empty):
    torch.manual_seed(0)
    size = {"rows": 4, "width": 5, "hidden": 6, "out": 7, empty: 0}
    args = arguments(size["rows"], width=size["width"], hidden=size["hidden"], out=size["out"])
    check_against_reference(MLP, args)


@pytest.mark.parametrize("place", range(5))
def test_one_gradient_alone_is_right(place):
    torch.manual_seed(place)
    args = [argument.detach() for argument in arguments(12)]
    args[place].requires_grad_()
    check_against_reference(MLP, args)


def test_without_gradients_nothing_for_a_backward_is_written(monkeypatch):
    from forge_kernels.triton import matmul as products

    modes = []

    def noted(a, b, bias, kind, mode="value", pre=None):
        modes.append(mode)
        return product(a, b, bias, kind, mode, pre)

    product = products.product
    monkeypatch.setattr(products, "product", noted)
    args = arguments(12)
    with torch.no_grad():
        result = mlp(*args)
    assert modes == ["value"]
    assert not result.requires_grad
    assert distance(result, mlp_reference(*in_float64(args)).detach()) < MLP.tolerance[torch.float16]


def test_autocast_casts_arguments_and_gradients_keep_dtypes():
    args = arguments(12, dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        results = run(mlp, args, {})
    rounded = [argument.detach().bfloat16().requires_grad_() for argument in args]
    exact = run(mlp_reference, in_float64(rounded), {})
    assert [result.dtype for result in results] == [torch.bfloat16] + [torch.float32] * 5
    for result, right in zip(results, exact, strict=True):
        assert distance(result, right) < MLP.tolerance[torch.bfloat16]


def test_a_second_derivative_is_refused():
    args = arguments(12)
    with pytest.raises(KernelError, match=r"mlp can be differentiated once"):
        torch.autograd.grad(mlp(*args).sum(), args, create_graph=True)


def test_torch_func_and_dual_numbers_are_as_in_torch():
    x, *rest = (argument.detach() for argument in arguments(6))
    fused, exact = (lambda x, f=f: f(x, *rest) for f in (mlp, mlp_reference))
    torch.testing.assert_close(
        torch.func.grad(lambda x: fused(x).sum())(x), torch.func.grad(lambda x: exact(x).sum())(x)
    )
    torch.testing.assert_close(torch.func.jvp(fused, (x,), (x,)), torch.func.jvp(exact, (x,), (x,)))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        torch.testing.assert_close(forward_ad.unpack_dual(fused(dual)), forward_ad.unpack_dual(exact(dual)))


@pytest.mark.slow
def test_compiles_whole():
    check_compiles_whole(MLP, arguments(3, 4))


@pytest.mark.slow
def test_the_operators_are_registered_as_torch_asks():
    from forge_kernels.triton.mlp import first, hidden_grad

    x, w1, b1, w2, _ = arguments(5, width=6, hidden=8, out=4)
    grad, pre = torch.randn(5, 4, device=DEVICE).half(), torch.randn(5, 8, device=DEVICE).half()
    torch.library.opcheck(first, (x, w1, b1, "gelu"))
    torch.library.opcheck(hidden_grad, (grad, w2.detach(), pre, "gelu"))


def test_shapes_that_do_not_fit_are_refused():
    x, w1, b1, w2, b2 = arguments(3)
    with pytest.raises(KernelError, match=r"w1 of \(H, D\).*\(3, 20\), \(20, 40\)"):
        mlp(x, w1.t(), b1, w2, b2)
    with pytest.raises(KernelError, match=r"b2 of \(D',\)"):
        mlp(x, w1, b1, w2, b1)


@pytest.mark.parametrize("device", [DEVICE, "meta"])  # where the kernel would run, and where the reference would
def test_dtypes_that_differ_are_refused(device):
    x, *rest = (argument.detach().to(device) for argument in arguments(3))
    with pytest.raises(KernelError, match=r"one dtype.*x torch.bfloat16.*w1 torch.float16"):
        mlp(x.bfloat16(), *rest)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_numbers_that_are_not_floating_point_are_refused(dtype):
    with pytest.raises(KernelError, match=r"floating-point.*x is"):
        mlp(*(argument.detach().to(dtype) for argument in arguments(3)))


def test_float32_goes_to_plain_torch():
    args = arguments(12, dtype=torch.float32)
    assert torch.equal(mlp(*args), mlp_reference(*args))
