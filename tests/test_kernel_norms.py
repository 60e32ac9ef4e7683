"""rms_norm and layer_norm against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from forge.errors import KernelError
from forge.kernels.contract import Functional
from forge.kernels.ops import norms
from forge.kernels.ops.norms import LAYER_NORM, RMS_NORM, layer_norm, rms_norm
from tests.kernel_kit import DEVICE, check_against_reference, check_compiles_whole, distance

both = pytest.mark.parametrize("kernel", [RMS_NORM, LAYER_NORM], ids=lambda kernel: kernel.name)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
# rows of 1 to 3 entries have gradients of almost 0, of which only rounding is left; they have a test of their own
shapes = st.tuples(st.lists(st.integers(0, 9), max_size=2), st.integers(4, 70)).map(lambda s: (*s[0], s[1]))


def arguments(kernel, shape, dtype=torch.float32, weights=None, residual=None, present=(True, True), scale=1.0):
    """x, weight, for layer_norm bias, eps, residual."""

    def leaf(size, kind):
        return (torch.randn(size, device=DEVICE) * scale).to(kind).requires_grad_()

    vectors = [leaf(shape[-1], weights or dtype) if there else None for there in present]
    args = [leaf(shape, dtype), *vectors[: 2 if kernel is LAYER_NORM else 1], 1e-5]
    return args if residual is None else [*args, leaf(shape, residual)]


@both
@given(shape=shapes, dtype=dtypes, scale=st.sampled_from([0.1, 1.0, 100.0]), present=st.tuples(*[st.booleans()] * 2))
def test_any_shape_and_dtype_equals_the_reference(kernel, shape, dtype, scale, present):
    check_against_reference(kernel, arguments(kernel, shape, dtype, scale=scale, present=present))


@both
@given(shape=shapes, dtype=dtypes, weights=dtypes, residual=dtypes)
def test_the_sum_with_a_residual_is_normalised_and_returned_in_any_mix_of_dtypes(
    kernel, shape, dtype, weights, residual
):
    args = arguments(kernel, shape, dtype, weights, residual)
    narrowest = max(kernel.tolerance[d] for d in (dtype, weights, residual))
    check_against_reference(kernel, args, tolerance=narrowest)
    y, h = kernel.function(*args)
    assert y.dtype == dtype
    assert h.dtype == torch.promote_types(dtype, residual)


@both
def test_rows_too_wide_for_registers_equal_the_reference(kernel, monkeypatch):
    from forge.kernels.triton import norms as triton_norms

    monkeypatch.setattr(triton_norms, "WIDEST_FORWARD", 64)
    monkeypatch.setattr(triton_norms, "WIDEST_BACKWARD", 64)
    monkeypatch.setattr(triton_norms, "CHUNK", 64)
    check_against_reference(kernel, arguments(kernel, (5, 200)))
    check_against_reference(kernel, arguments(kernel, (3, 129), torch.bfloat16, torch.float32, torch.bfloat16))


@both
def test_a_large_offset_costs_no_precision(kernel):
    x = (torch.randn(6, 50, device=DEVICE) + 1000).requires_grad_()
    result, exact = kernel.function(x), kernel.reference(x.double())
    assert distance(result.detach(), exact.detach()) < 1e-4


@both
def test_rows_of_one_entry_and_rows_of_zeros_are_as_in_torch(kernel):
    for x in (torch.randn(7, 1, device=DEVICE), torch.zeros(3, 9, device=DEVICE)):
        x.requires_grad_()
        y, right = kernel.function(x), kernel.reference(x)
        grads = [torch.autograd.grad(out.sum(), x)[0] for out in (y, right)]
        torch.testing.assert_close(y, right)
        torch.testing.assert_close(*grads, atol=1e-3, rtol=1e-3)


@both
def test_infinite_and_nan_entries_spoil_their_own_row_only(kernel):
    x = torch.randn(4, 20, device=DEVICE)
    x[1, 3], x[2, 0] = float("inf"), float("nan")
    y = kernel.function(x)
    torch.testing.assert_close(y, kernel.reference(x), equal_nan=True)
    assert torch.isfinite(y[[0, 3]]).all()


@both
def test_strides_do_not_matter(kernel):
    whole = torch.randn(6, 30, 5, device=DEVICE)
    for x in (whole.transpose(1, 2), whole[:, 3:20, 1], whole[::2, :, 0], torch.randn(30, device=DEVICE).expand(4, 30)):
        x = x.detach().requires_grad_()
        weight = torch.randn(2 * x.shape[-1], device=DEVICE)[::2].requires_grad_()
        check_against_reference(kernel, [x, weight])


@both
def test_only_one_of_the_two_results_needs_to_be_used(kernel):
    args = arguments(kernel, (3, 10), residual=torch.float32)
    for place in (0, 1):
        grads = [
            torch.autograd.grad(f(*args)[place].square().sum(), args[0])[0] for f in (kernel.function, kernel.reference)
        ]
        torch.testing.assert_close(*grads)


@both
def test_the_result_can_have_another_dtype(kernel):
    args = arguments(kernel, (3, 10))
    y = kernel.function(*args, dtype=torch.bfloat16)
    assert y.dtype == torch.bfloat16
    check_against_reference(kernel, args, {"dtype": torch.bfloat16}, tolerance=8e-3)


@both
def test_under_autocast_bfloat16_stays_bfloat16_with_float32_weights(kernel):
    args = arguments(kernel, (3, 10), torch.bfloat16, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        y, right = kernel.function(*args), kernel.reference(*args)
    assert y.dtype == right.dtype == torch.bfloat16
    check_against_reference(kernel, args)


@both
def test_the_gradient_of_frozen_weights_is_not_computed(kernel):
    args = arguments(kernel, (3, 10))
    args[1] = args[1].detach()
    check_against_reference(kernel, args)


@both
def test_results_are_the_same_bits_every_time(kernel):
    args = arguments(kernel, (40, 33))
    first, second = (torch.autograd.grad(kernel.function(*args).sin().sum(), args[:2]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@both
def test_compiles_whole(kernel):
    check_compiles_whole(kernel, arguments(kernel, (3, 100), torch.float32, residual=torch.float32))


def test_the_operators_are_registered_as_torch_asks():
    from forge.kernels.triton.norms import norm

    x, weight, bias, _, residual = arguments(LAYER_NORM, (3, 5), residual=torch.float32)
    torch.library.opcheck(norm, (x, residual, weight, bias, 1e-5, True, torch.float32))
    torch.library.opcheck(norm, (x, None, weight, None, 1e-5, False, torch.bfloat16))


def test_it_stands_in_for_the_functionals_of_torch():
    (layer,), (rms,) = ([f.call for f in k.replaces if isinstance(f, Functional)] for k in (LAYER_NORM, RMS_NORM))
    x, weight, bias = (t.detach() for t in arguments(LAYER_NORM, (3, 8))[:3])
    called = []

    def spy(function):
        return lambda *args: called.append(function) or function(*args)

    torch.testing.assert_close(
        layer(spy(F.layer_norm), x, (8,), weight, bias, 1e-3), F.layer_norm(x, (8,), weight, bias, 1e-3)
    )
    torch.testing.assert_close(layer(spy(F.layer_norm), x, [8], weight=weight), F.layer_norm(x, [8], weight))
    torch.testing.assert_close(rms(spy(F.rms_norm), x, (8,), weight), F.rms_norm(x, (8,), weight))
    tiny = x * 1e-4  # where eps decides
    torch.testing.assert_close(rms(spy(F.rms_norm), tiny, (8,), weight, None), F.rms_norm(tiny, (8,), weight))
    assert not called, "the kernel fits"
    torch.testing.assert_close(layer(spy(F.layer_norm), x, (3, 8)), F.layer_norm(x, (3, 8)))
    torch.testing.assert_close(layer(spy(F.layer_norm), x.double(), (8,)), F.layer_norm(x.double(), (8,)))
    torch.testing.assert_close(rms(spy(F.rms_norm), x, (3, 8)), F.rms_norm(x, (3, 8)))
    assert called == [F.layer_norm, F.layer_norm, F.rms_norm]
    with pytest.raises(RuntimeError):
        layer(F.layer_norm, x, (5,))


@both
def test_what_is_not_supported_runs_as_plain_torch(kernel):
    x = torch.randn(3, 8, device=DEVICE, dtype=torch.float64)
    torch.testing.assert_close(kernel.function(x), kernel.reference(x))
    assert kernel.supports(x) == "it has no float64"
    assert "65536" in kernel.supports(torch.empty(1, norms.WIDEST + 1, device=DEVICE))


def test_shapes_that_do_not_fit_are_refused():
    x = torch.ones(3, 5, device=DEVICE)
    with pytest.raises(KernelError, match=r"weight of shape \(5,\).*\(3,\)"):
        rms_norm(x, torch.ones(3, device=DEVICE))
    with pytest.raises(KernelError, match=r"bias of shape \(5,\).*\(1, 5\)"):
        layer_norm(x, None, torch.ones(1, 5, device=DEVICE))
    with pytest.raises(KernelError, match=r"residual of x's shape.*\(5, 3\)"):
        layer_norm(x, residual=torch.ones(5, 3, device=DEVICE))
    with pytest.raises(KernelError, match="has none"):
        rms_norm(torch.ones((), device=DEVICE))


def test_the_least_cost_counts_the_addition():
    x = torch.ones(4, 8, device=DEVICE)
    assert RMS_NORM.cost(x).bytes == 5 * 4 * 8 * 4
    assert LAYER_NORM.cost(x, residual=x).bytes == 8 * 4 * 8 * 4
