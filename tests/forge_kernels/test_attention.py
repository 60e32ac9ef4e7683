"""attention against plain torch: softmax(q·kᵀ)·v, causal and full, grouped heads, any lengths."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from forge_kernels.ops.attention import ATTENTION, attention, stand_in
from tests.support.kernel_kit import (
    DEVICE,
    check_against_reference,
    few,
)
from tests.support.profiles import some

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(b=1, h=2, hk=None, s=8, t=None, d=16, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as models have them: heads inside the sequence."""
    hk, t = hk or h, s if t is None else t

    def heads(n, length):
        return torch.randn(b, length, n, d, device=DEVICE).to(dtype).transpose(1, 2).requires_grad_()

    return heads(h, s), heads(hk, t), heads(hk, t)


def plainly(q, k, v, causal=False, scale=None):
    """The formula, written out."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


@few
@given(
    b=st.integers(1, 2), hk=st.integers(1, 2), group=st.integers(1, 2), s=st.integers(2, 80), t=st.integers(2, 140),
    d=st.sampled_from([16, 17, 24, 40, 64]), dtype=st.sampled_from(DTYPES), causal=st.booleans(),
)  # fmt: skip
def test_any_shape_and_dtype_equals_the_reference(b, hk, group, s, t, d, dtype, causal):
    least = 4 if dtype == torch.float32 else 14  # with few keys to see, dp - δ cancels: δ is from the rounded output
    s, t = s + least, t + least
    check_against_reference(ATTENTION, tensors(b, hk * group, hk, s, t, d, dtype), {"causal": causal})


@pytest.mark.slow
@pytest.mark.parametrize(("d", "dtype"), list(zip((128, 200, 256), DTYPES, strict=True)))
def test_large_heads_equal_the_reference(d, dtype):
    check_against_reference(ATTENTION, tensors(1, 1, 1, 70, 40, d, dtype), {"causal": True})


@pytest.mark.parametrize("dtype", some(DTYPES, quick=1))
def test_large_scores_neither_overflow_nor_vanish(dtype):
    q, k, v = tensors(s=70, dtype=dtype)
    big = (q.detach() * 60, k.detach() * 60)  # scores in the thousands
    out = attention(*big, v, causal=True)
    exact = plainly(big[0].double(), big[1].double(), v.double(), causal=True)
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
    down = attention(big[0].abs(), -big[1].abs(), v)
    assert torch.isfinite(down).all()
    assert torch.isfinite(torch.autograd.grad(down.sum(), v)[0]).all()


def test_a_scale_that_is_not_positive_is_left_to_torch():
    q, k, v = tensors(s=20)
    assert ATTENTION.supports(q, k, v, scale=-1.0)
    torch.testing.assert_close(attention(q, k, v, scale=-1.0), plainly(q, k, v, scale=-1.0))


@pytest.mark.parametrize(("b", "h", "s", "t"), [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)])
def test_empty_inputs_give_empty_results_or_zeros(b, h, s, t):
    args = tensors(b, h, h, s, t)
    check_against_reference(ATTENTION, args)
    assert not attention(*args).any()


def test_it_stands_in_for_torch_where_it_fits():
    def refuse(*args, **kwargs):
        raise AssertionError("the original was called")

    q, k, v = tensors(1, 4, 2, 20)
    assert ATTENTION.replaces == {"torch.nn.functional.scaled_dot_product_attention": stand_in}
    out = stand_in(refuse, q, k, value=v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


@pytest.mark.parametrize(
    "change",
    ["mask", "dropout", "three dimensions", "no enable_gqa", "float64", "wider values", "batch of 1", "another class"],
)
def test_it_leaves_to_torch_what_it_does_not_do(change):
    q, k, v = (x.detach() for x in tensors(2, 4, 4, 20))
    options = {}
    if change == "mask":
        options["attn_mask"] = torch.ones(20, 20, dtype=torch.bool, device=DEVICE).tril()
    elif change == "dropout":
        options["dropout_p"] = 0.5
    elif change == "three dimensions":
        q, k, v = q[0], k[0], v[0]
    elif change == "no enable_gqa":
        k, v = k[:, :1], v[:, :1]  # torch broadcasts these
    elif change == "float64":
        q, k, v = q.double(), k.double(), v.double()
    elif change == "wider values":
        v = torch.cat([v, v], 3)
    elif change == "another class":
        k = k.as_subclass(type("Other", (Tensor,), {}))
    else:
        k, v = k[:1], v[:1]
    called = []
    stand_in(lambda *args, **kwargs: called.append((args, kwargs)), q, k, v, **options)
    assert len(called) == 1
    args, kwargs = called[0]
    assert args[0] is q
    assert args[3:5] == (options.get("attn_mask"), options.get("dropout_p", 0.0))
    assert kwargs == {"scale": None, "enable_gqa": False}
