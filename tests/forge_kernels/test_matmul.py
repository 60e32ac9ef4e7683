"""matmul against plain torch."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from forge.errors import KernelError
from forge_kernels.ops.matmul import ACTIVATIONS, MATMUL, matmul, matmul_reference
from tests.support.kernel_kit import (
    DEVICE,
    check_against_reference,
    check_compiles_whole,
    distance,
    few,
    in_float64,
    run,
)
from tests.support.profiles import some

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
activations = st.sampled_from(list(ACTIVATIONS))


def new(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_()


@few
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    depth=st.integers(1, 150),
    columns=st.integers(1, 150),
    dtype=dtypes,
    activation=activations,
    bias=st.booleans(),
)
def test_any_shape_dtype_and_activation_equals_the_reference(rows, depth, columns, dtype, activation, bias):
    torch.manual_seed(depth * columns)
    args = [new(*rows, depth, dtype=dtype), new(depth, columns, dtype=dtype, scale=depth**-0.5)]
    args += [new(columns, dtype=dtype)] if bias else []
    check_against_reference(MATMUL, args, {"activation": activation})


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
    check_against_reference(MATMUL, [a, b, new(columns, dtype=dtype)], {"activation": "gelu"})


@pytest.mark.slow
@pytest.mark.parametrize("shape", [pytest.param((1040, 70, 130), marks=pytest.mark.slow), (5, 200, 520)])
def test_several_tiles_and_steps_equal_the_reference(shape):
    rows, depth, columns = shape
    args = [new(rows, depth, dtype=torch.bfloat16), new(depth, columns, dtype=torch.bfloat16, scale=depth**-0.5)]
    check_against_reference(MATMUL, [*args, new(columns, dtype=torch.bfloat16)], {"activation": "silu"})


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_an_empty_product_is_as_in_torch(rows, depth, columns):
    check_against_reference(MATMUL, [new(rows, depth), new(depth, columns), new(columns)], {"activation": "gelu"})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinite_and_large_values_are_as_in_torch(activation):
    a = torch.tensor([[float("inf")], [1e4], [-1e4], [float("nan")], [0.0]], device=DEVICE)
    b = torch.ones(1, 3, device=DEVICE)
    result = matmul(a, b, activation=activation)
    torch.testing.assert_close(
        result, matmul_reference(a.double(), b.double(), activation=activation).float(), equal_nan=True
    )


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_gradients_that_are_asked_for_are_computed(wanted, activation):
    args = [new(6, 5).detach(), new(5, 4).detach(), new(4).detach()]
    for place in wanted:
        args[place].requires_grad_()
    check_against_reference(MATMUL, args, {"activation": activation})
    result = matmul(*args, activation).sum()
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
        results = run(matmul, args, {"activation": "gelu"})
    rounded = [argument.detach().bfloat16().requires_grad_() for argument in args]
    exact = run(matmul_reference, in_float64(rounded), {"activation": "gelu"})
    assert [result.dtype for result in results] == [torch.bfloat16] + [torch.float32] * 3
    for result, right in zip(results, exact, strict=True):
        assert distance(result, right) < MATMUL.tolerance[torch.bfloat16]


@pytest.mark.slow
@pytest.mark.parametrize("activation", [pytest.param(None, marks=pytest.mark.slow), "gelu"])
def test_compiles_whole(activation):
    check_compiles_whole(MATMUL, [new(3, 10, 20), new(20, 6), new(6)], {"activation": activation})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "keep"), [pytest.param("none", False, marks=pytest.mark.slow), ("gelu", True)])
def test_the_operators_are_registered_as_torch_asks(kind, keep):
    from forge_kernels.triton.matmul import activation_grad
    from forge_kernels.triton.matmul import matmul as op

    torch.library.opcheck(op, (new(3, 5), new(5, 4), new(4), kind, keep))
    torch.library.opcheck(activation_grad, (new(3, 5).detach(), new(3, 5).detach(), "gelu"))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(KernelError, match=r"\(\.\.\., K\).*\(3, 5\), \(4, 5\) and None"):
        matmul(torch.ones(3, 5, device=DEVICE), torch.ones(4, 5, device=DEVICE))
    with pytest.raises(KernelError, match=r"bias of \(N,\).*\(3,\)"):
        matmul(torch.ones(3, 5, device=DEVICE), torch.ones(5, 4, device=DEVICE), torch.ones(3, device=DEVICE))


@pytest.mark.parametrize("device", [DEVICE, "meta"])  # where the kernel would run, and where the reference would
def test_dtypes_that_differ_are_refused(device):
    with pytest.raises(KernelError, match=r"one dtype.*a torch.float32.*b torch.float16"):
        matmul(torch.ones(3, 5, device=device), torch.ones(5, 4, device=device, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_numbers_that_are_not_floating_point_are_refused(dtype):
    with pytest.raises(KernelError, match=r"floating-point.*a is"):
        matmul(torch.ones(3, 5, device=DEVICE, dtype=dtype), torch.ones(5, 4, device=DEVICE, dtype=dtype))


def test_float64_goes_to_plain_torch():
    a, b = new(3, 5).double(), new(5, 4).double()
    assert torch.equal(matmul(a, b, activation="relu"), torch.relu(a @ b))


def test_without_an_activation_it_can_be_differentiated_twice():
    def second(function):
        (slope,) = torch.autograd.grad(function(a, b, bias).pow(3).sum(), [a], create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [a, b, bias])

    a, b, bias = new(6, 5), new(5, 4), new(4)
    for result, right in zip(second(matmul), second(matmul_reference), strict=True):
        torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", [activation for activation in ACTIVATIONS if activation])
def test_a_second_derivative_through_an_activation_is_refused(activation):
    a, b = new(6, 5), new(5, 4)
    with pytest.raises(KernelError, match=r"matmul can be differentiated once"):
        torch.autograd.grad(matmul(a, b, None, activation).sum(), [a], create_graph=True)


def test_torch_func_and_dual_numbers_are_as_in_torch():
    a, b = new(6, 5).detach(), new(5, 4).detach()
    gelu = partial(matmul, b=b, activation="gelu")
    exact = partial(matmul_reference, b=b, activation="gelu")
    torch.testing.assert_close(
        torch.func.grad(lambda a: gelu(a).sum())(a), torch.func.grad(lambda a: exact(a).sum())(a)
    )
    torch.testing.assert_close(torch.func.jvp(gelu, (a,), (a,)), torch.func.jvp(exact, (a,), (a,)))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, a)
        torch.testing.assert_close(forward_ad.unpack_dual(gelu(dual)), forward_ad.unpack_dual(exact(dual)))


def test_every_launch_is_made_on_the_device_of_its_tensors(monkeypatch):
    from forge_kernels.triton import matmul as module
    from forge_kernels.triton import product

    seen = []

    @contextmanager
    def device_of(tensor):
        seen.append("device")
        yield
        seen.append("back")

    for place, kernel in ((product, "_product"), (module, "_slopes")):
        monkeypatch.setattr(place, "device_of", device_of)
        monkeypatch.setattr(place, kernel, Launches(seen))
    matmul(new(6, 5), new(5, 4), None, "gelu").sum().backward()
    assert seen == ["device", (1,), "back", "device", (1, 1), "back"]


class Launches:
    """Stands for a Triton kernel: notes with which grids it was launched."""

    def __init__(self, grids):
        self.grids = grids

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **options: None
