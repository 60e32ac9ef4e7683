"""rope against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import KernelError
from forge_kernels.ops.rope import ROPE, rope
from tests.support.kernel_kit import (
    DEVICE,
    check_against_reference,
    check_compiles_whole,
    check_launches_where_the_tensors_are,
    check_transformed,
    every_transform,
    few,
    run,
)

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def arguments(batch=2, length=3, heads=(4, 2), entries=8, dtype=torch.float32, angles=(), full=True, transposed=True):
    def leaf(count):
        if transposed:
            whole = torch.randn(batch, length, count, entries, device=DEVICE).to(dtype).transpose(1, 2)
        else:
            whole = torch.randn(batch, count, length, entries, device=DEVICE).to(dtype)
        return whole.requires_grad_()

    shape = (*angles, length, entries if full else entries // 2)
    return [*map(leaf, heads), *(torch.randn(shape, device=DEVICE) for _ in range(2))]


@few
@given(
    batch=st.integers(0, 2),
    length=st.integers(0, 4),
    heads=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    entries=st.sampled_from([2, 6, 8, 20]),
    dtype=dtypes,
    full=st.booleans(),
    transposed=st.booleans(),
    interleaved=st.booleans(),
)
def test_any_shape_dtype_and_layout_equals_the_reference(
    batch, length, heads, entries, dtype, full, transposed, interleaved
):
    args = arguments(batch, length, heads, entries, dtype, full=full, transposed=transposed)
    check_against_reference(ROPE, args, {"interleaved": interleaved})


@pytest.mark.parametrize("batch", [1, 2])
def test_angles_can_have_a_batch_dimension(batch):
    check_against_reference(ROPE, arguments(angles=(batch,)))


@pytest.mark.slow
def test_more_heads_than_a_program_takes_equal_the_reference(monkeypatch):
    from forge_kernels.triton import rope as triton_rope

    monkeypatch.setattr(triton_rope, "plan", lambda pairs: (2, 4))
    check_against_reference(ROPE, arguments(heads=(5, 3)))


def test_views_of_one_projection_are_turned_in_their_own_layout():
    whole = torch.randn(2, 3, 4 + 2 + 2, 8, device=DEVICE).transpose(1, 2)
    q, k = (part.detach().requires_grad_() for part in whole.split([4, 2, 2], 1)[:2])
    cos, sin = arguments()[2:]
    check_against_reference(ROPE, [q, k, cos, sin])
    for turned in rope(q, k, cos, sin):
        assert turned.transpose(1, 2).is_contiguous(), "so that what follows can view it as (batch, length, width)"


def test_entries_that_are_not_next_to_each_other_are_turned_too():
    q, k, cos, sin = arguments()
    q = torch.randn(2, 4, 8, 3, device=DEVICE).transpose(2, 3).requires_grad_()
    check_against_reference(ROPE, [q, k, cos.t().contiguous().t(), sin])


def test_it_is_what_llama_computes():
    q, k, cos, sin = arguments(full=False)
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    for x, turned in zip((q, k), rope(q, k, cos, sin), strict=True):
        half = x.shape[-1] // 2
        right = x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
        torch.testing.assert_close(turned, right)


@pytest.mark.slow
def test_compiles_whole():
    check_compiles_whole(ROPE, arguments())


@pytest.mark.slow
def test_the_operator_is_registered_as_torch_asks():
    from forge_kernels.triton.rope import rope as operator

    torch.library.opcheck(operator, (*arguments(), False, False))


def test_it_can_be_differentiated_twice():
    args = arguments(1, 2, (1, 1), 4)

    def second(function):
        (first,) = torch.autograd.grad(function(*args)[0].pow(3).sum(), args[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), args[0])[0]

    torch.testing.assert_close(second(rope), second(ROPE.reference))


def test_angles_that_are_trained_run_as_plain_torch():
    q, k, cos, sin = arguments()
    cos.requires_grad_()
    assert ROPE.supports(q, k, cos, sin) == "it does not compute gradients of cos and sin"
    result, right = (
        torch.autograd.grad(function(q, k, cos, sin)[0].sin().sum(), cos)[0] for function in (rope, ROPE.reference)
    )
    assert torch.equal(result, right)


def test_it_runs_on_the_device_of_its_tensors(monkeypatch):
    from forge_kernels.triton import rope as triton_rope

    args = arguments()
    check_launches_where_the_tensors_are(monkeypatch, triton_rope, lambda: run(rope, args, {}))


@every_transform
def test_transforms_run_as_plain_torch(transform):
    q, *rest = (x.detach() for x in arguments())
    check_transformed(transform, lambda q: rope(q, *rest)[0], lambda q: ROPE.reference(q, *rest)[0], q)


@pytest.mark.parametrize("place", range(4))
def test_what_is_not_floating_point_is_refused(place):
    args = arguments()
    args[place] = args[place].long()
    with pytest.raises(KernelError, match=f"rope needs floating-point tensors; {('q', 'k', 'cos', 'sin')[place]} is"):
        rope(*args)


def test_shapes_that_do_not_fit_are_refused():
    q, k, cos, sin = arguments()
    with pytest.raises(KernelError, match=r"heads only.*\(2, 4, 3, 8\).*\(2, 2, 2, 8\)"):
        rope(q, k[:, :, 1:], cos, sin)
    with pytest.raises(KernelError, match=r"cos and sin of shape \(3, 8\) or \(3, 4\)"):
        rope(q, k, cos[1:], sin[1:])
    with pytest.raises(KernelError, match="even number"):
        rope(q[..., :7], k[..., :7], cos, sin)
