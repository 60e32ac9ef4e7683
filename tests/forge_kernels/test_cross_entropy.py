"""cross_entropy against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from forge_kernels.contract import INTERPRETED
from forge_kernels.ops.cross_entropy import CROSS_ENTROPY, cross_entropy, reference
from forge_kernels.triton.cross_entropy_rows import split
from tests.conftest import PROFILE
from tests.support.kernel_kit import DEVICE, check_against_reference, few

dtypes = st.sampled_from([torch.float32, torch.bfloat16])
options = st.fixed_dictionaries(
    {},
    optional={
        "label_smoothing": st.sampled_from([0.1, 1.0]),
        "reduction": st.sampled_from(["mean", "sum"]),
        "ignore_index": st.sampled_from([-100, 0, -1]),
    },
)
inf = float("inf")
(stand_in,) = CROSS_ENTROPY.replaces.values()


@pytest.fixture(autouse=True, scope="module")
def rounding() -> Iterator[None]:
    """Triton's interpreter cuts float32 off to bfloat16, which is twice as far off as rounding: it rounds meanwhile."""
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    cut_off = builder.cast_impl

    def cast(self: Any, x: Any, dtype: Any) -> Any:
        if x.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cut_off(self, x, dtype)
        rounded = torch.from_numpy(x.data.copy()).bfloat16().view(torch.uint16)
        return interpreter.TensorHandle(rounded.numpy(), tl.bfloat16)

    builder.cast_impl = cast
    yield
    builder.cast_impl = cut_off


def batch(rows, classes, dtype=torch.float32, scale=1.0):
    logits = (torch.randn(rows, classes, device=DEVICE) * scale).to(dtype).requires_grad_()
    return logits, torch.randint(classes, (rows,), device=DEVICE)


def gradient(loss, logits, **kwargs):
    return torch.autograd.grad(loss, logits, **kwargs)[0]


@few
@given(
    rows=st.integers(0, 5),
    classes=st.one_of(st.integers(2, 300), st.sampled_from([1024, 2049, 5000])),
    dtype=dtypes,
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    chosen=options,
)
def test_any_shape_dtype_and_option_equals_the_reference(rows, classes, dtype, scale, chosen):
    logits, target = batch(rows, classes, dtype, scale)
    if scale > 1:
        target = logits.argmin(1)  # a sure and right row has a loss of nearly 0: nothing to measure an error by
    target[::3] = chosen.get("ignore_index", -100)
    check_against_reference(CROSS_ENTROPY, (logits, target), chosen)


# -- rows that are split over programs --------------------------------------------------------------------------------


def parts(logits):
    return split(logits.shape[1], logits.element_size()).parts


@pytest.mark.slow
@settings(max_examples=3 if PROFILE == "quick" else 50)
@given(classes=st.sampled_from([4609, 9217, 10000, 14000]), dtype=dtypes, chosen=options)
def test_split_rows_equal_the_reference_with_any_option(classes, dtype, chosen):
    logits, target = batch(2, classes + 4608 * (dtype != torch.float32), dtype)
    target[0] = chosen.get("ignore_index", -100)
    assert parts(logits) > 1
    check_against_reference(CROSS_ENTROPY, (logits, target), chosen)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinite_and_huge_logits_give_what_torch_gives(smoothing):
    logits = torch.randn(7, 40, device=DEVICE)
    logits[0, 5:] = -inf
    logits[1, 3] = -inf  # the target's
    logits[2] = -inf
    logits[3, 7] = inf
    logits[4] *= 1e4
    logits[5] += 1e4
    logits[6, 0] = float("nan")
    target = torch.full((7,), 3, device=DEVICE)
    for row in range(7):
        one = logits[row : row + 1].clone().requires_grad_()
        chosen = {"reduction": "sum", "label_smoothing": smoothing}
        check_against_reference(CROSS_ENTROPY, (one, target[:1]), chosen)


def test_a_target_that_is_no_class_makes_its_row_nan():
    logits, target = batch(4, 30)
    target[1], target[2] = 30, -1
    loss = cross_entropy(logits, target, reduction="sum")
    assert gradient(loss, logits).isnan().any(1).tolist() == [False, True, True, False]
    assert loss.isnan()


def test_with_all_targets_ignored_the_mean_is_nan():
    logits = torch.full((3, 30), inf, device=DEVICE, requires_grad=True)
    loss = cross_entropy(logits, torch.full((3,), -100, device=DEVICE))
    assert loss.isnan()
    assert (gradient(loss, logits) == 0).all()


def test_a_second_backward_through_the_same_loss_is_right():
    logits, target = batch(3, 50)
    expected = gradient(reference(logits, target), logits)
    loss = cross_entropy(logits, target)
    first = gradient(loss * 3, logits, retain_graph=True)
    second = gradient(loss * 0, logits, retain_graph=True)
    third = gradient(loss, logits)
    torch.testing.assert_close(first, expected * 3)
    assert (second == 0).all()
    torch.testing.assert_close(third, expected)


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float16, {}), (torch.float32, {"reduction": "none", "label_smoothing": 0.1})]
)
def test_a_loss_whose_gradient_comes_later_is_plain_torchs(dtype, options):
    logits, target = batch(6, 50, dtype)
    assert CROSS_ENTROPY.supports(logits, target, **options) is not None
    ours, plain = (function(logits, target, **options) for function in (cross_entropy, reference))
    assert torch.equal(ours, plain)
    assert torch.equal(gradient(ours.sum() * 2**14, logits), gradient(plain.sum() * 2**14, logits))


# -- in place of torch.nn.functional.cross_entropy --------------------------------------------------------------------


def original(*args, **kwargs):
    return "original"


def test_it_stands_in_for_the_functional_with_its_dtype():
    logits, target = batch(4, 30, torch.bfloat16)
    target[0] = -100
    loss = stand_in(original, logits, target)
    assert loss.dtype == torch.bfloat16
    torch.testing.assert_close(loss, F.cross_entropy(logits, target), rtol=1e-2, atol=1e-2)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert stand_in(original, logits, target).dtype == torch.float32


def test_off_its_contract_the_functional_itself_runs():
    logits, target = batch(4, 30)
    assert stand_in(original, logits, target, torch.ones(30, device=DEVICE)) == "original"
    assert stand_in(original, logits, logits.softmax(1)) == "original"
    assert stand_in(original, logits[None], target[None, :, None].expand(1, 4, 30)[:, :, 0]) == "original"
    assert stand_in(original, logits[0], target[0]) == "original"
    assert stand_in(original, logits, target, reduction="nonsense") == "original"
    assert stand_in(original, logits.double(), target) == "original"
    assert stand_in(original, logits, target, size_average=True) == "original"
    assert stand_in(original, logits, target.int()) == "original"
    assert stand_in(original, logits.detach(), target) == "original"
    assert stand_in(original, logits, target, reduction="none") == "original"
