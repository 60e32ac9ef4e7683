"""linear_cross_entropy against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_kernels.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, linear_cross_entropy, ops
from tests.forge_kernels.test_cross_entropy import rounding  # noqa: F401 - a fixture
from tests.support.kernel_kit import DEVICE, check_against_reference, few


def head(tokens, width, classes, dtype=torch.float32, weight_dtype=None, bias=False):
    hidden = torch.randn(tokens, width, device=DEVICE).to(dtype).requires_grad_()
    weight = (torch.randn(classes, width, device=DEVICE) * width**-0.5).to(weight_dtype or dtype).requires_grad_()
    offset = torch.randn(classes, device=DEVICE).to(weight_dtype or dtype).requires_grad_() if bias else None
    return hidden, weight, torch.randint(classes, (tokens,), device=DEVICE), offset


@few
@given(
    tokens=st.integers(0, 9),
    width=st.integers(1, 40),
    classes=st.integers(2, 300),
    dtypes=st.sampled_from(
        [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
    ),
    bias=st.booleans(),
    chosen=st.fixed_dictionaries(
        {},
        optional={
            "chunk": st.sampled_from([1, 3, 100]),
            "label_smoothing": st.just(0.1),
            "reduction": st.sampled_from(["mean", "sum"]),
            "ignore_index": st.sampled_from([-100, 0]),
        },
    ),
)
def test_any_shape_dtype_chunk_and_option_equals_the_reference(tokens, width, classes, dtypes, bias, chosen):
    hidden, weight, target, offset = head(tokens, width, classes, *dtypes, bias=bias)
    target[::3] = chosen.get("ignore_index", -100)
    check_against_reference(LINEAR_CROSS_ENTROPY, (hidden, weight, target, offset), chosen)


@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_needed_are_computed(trained, monkeypatch):
    made = []

    def spy(*args):
        made.append(operator(*args))
        return made[-1]

    operator = ops.linear_cross_entropy
    monkeypatch.setattr(ops, "linear_cross_entropy", spy)
    hidden, weight, target, _ = head(6, 10, 50)
    hidden, weight = hidden.detach().requires_grad_(trained[0]), weight.detach().requires_grad_(trained[1])
    check_against_reference(LINEAR_CROSS_ENTROPY, (hidden, weight, target), {"chunk": 4})
    ((_, *grads),) = made
    assert [grad.numel() for grad in grads] == [60 * trained[0], 500 * trained[1], 0]


def test_the_gradient_of_a_float32_weight_adds_up_in_float32():
    hidden, weight, target, _ = head(16, 8, 20, torch.bfloat16, torch.float32)
    many, one = (torch.autograd.grad(linear_cross_entropy(hidden, weight, target, chunk=c), weight)[0] for c in (1, 16))
    assert many.dtype == torch.float32
    torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-7)
