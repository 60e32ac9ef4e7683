"""rms_norm and layer_norm against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from forge_kernels.ops import norms
from forge_kernels.ops.norms import (
    LAYER_NORM,
    RMS_NORM,
    stand_in_for_layer_norm,
    stand_in_for_rms_norm,
)
from tests.support.kernel_kit import (
    DEVICE,
    check_against_reference,
    few,
)

both = pytest.mark.parametrize("kernel", [RMS_NORM, LAYER_NORM], ids=lambda kernel: kernel.name)
stand_ins = pytest.mark.parametrize(
    ("stand_in", "original"),
    [(stand_in_for_rms_norm, F.rms_norm), (stand_in_for_layer_norm, F.layer_norm)],
    ids=["rms_norm", "layer_norm"],
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = st.sampled_from(DTYPES)
# rows of 1 to 3 entries have gradients of almost 0, of which only rounding is left; they have a test of their own
shapes = st.tuples(st.lists(st.integers(0, 9), max_size=2), st.integers(4, 70)).map(lambda s: (*s[0], s[1]))


def arguments(kernel, shape, dtype=torch.float32, weights=None, present=(True, True), scale=1.0):
    """x, weight, for layer_norm bias, eps."""

    def leaf(size, kind):
        return (torch.randn(size, device=DEVICE) * scale).to(kind).requires_grad_()

    vectors = [leaf(shape[-1], weights or dtype) if there else None for there in present]
    return [leaf(shape, dtype), *vectors[: 2 if kernel is LAYER_NORM else 1], 1e-5]


@both
@few
@given(
    shape=shapes,
    dtype=dtypes,
    weights=dtypes,
    scale=st.sampled_from([0.1, 1.0, 100.0]),
    present=st.tuples(*[st.booleans()] * 2),
)
def test_any_shape_and_dtypes_equal_the_reference(kernel, shape, dtype, weights, scale, present):
    check_against_reference(kernel, arguments(kernel, shape, dtype, weights, scale=scale, present=present))


@both
def test_infinite_and_nan_entries_spoil_their_own_row_only(kernel):
    x = torch.randn(4, 20, device=DEVICE)
    x[1, 3], x[2, 0] = float("inf"), float("nan")
    y = kernel.function(x)
    torch.testing.assert_close(y, kernel.reference(x), equal_nan=True)
    assert torch.isfinite(y[[0, 3]]).all()


@both
def test_the_result_can_have_another_dtype(kernel):
    args = arguments(kernel, (3, 10))
    assert kernel.function(*args, dtype=torch.bfloat16).dtype == torch.bfloat16
    check_against_reference(kernel, args, {"dtype": torch.bfloat16})


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@stand_ins
def test_under_autocast_a_stand_in_gives_what_torch_gives(stand_in, original, dtype, weighted):
    x = torch.randn(3, 8, device=DEVICE).to(dtype)
    weight = torch.randn(8, device=DEVICE) if weighted else None
    with torch.autocast(DEVICE, torch.bfloat16):
        result, right = stand_in(None, x, (8,), weight), original(x, (8,), weight)
    torch.testing.assert_close(result, right)  # dtypes too


@pytest.mark.parametrize("scale", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_without_eps_rms_norm_takes_torchs(dtype, scale):
    x = torch.full((2, 8), scale, device=DEVICE, dtype=dtype)
    torch.testing.assert_close(stand_in_for_rms_norm(F.rms_norm, x, (8,)), F.rms_norm(x, (8,)))


def test_they_stand_in_for_the_functionals_of_torch():
    layer, rms = stand_in_for_layer_norm, stand_in_for_rms_norm
    assert [*LAYER_NORM.replaces.values(), *RMS_NORM.replaces.values()] == [layer, rms]
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
def test_wider_rows_run_as_plain_torch(kernel):
    assert "8192" in kernel.supports(torch.empty(1, norms.WIDEST + 1, device=DEVICE))
