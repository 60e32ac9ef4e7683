"""clip_adamw, the function, against torch's own clip_grad_norm_ and AdamW."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_

from forge_kernels.ops import clip_adamw_tables
from forge_kernels.ops.clip_adamw import CLIP_ADAMW, clip_adamw, ops
from forge_kernels.ops.clip_adamw_optimizer import ClipAdamW
from forge_kernels.ops.clip_adamw_tables import CHUNK
from tests.support.clip_adamw_kit import OPTIONS, backward, check, flat, lists, mapped, network, same
from tests.support.kernel_kit import DEVICE, check_launches_where_the_tensors_are, few

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
shapes = st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=1, max_size=5)


@few
@given(
    shapes=shapes,
    dtypes=st.tuples(dtypes, dtypes, dtypes),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    max_norm=st.sampled_from([None, 0.0, 0.5, 1e4]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.95)]),
    made=st.sampled_from([0.0, 7.0, 1e5]),
)
def test_any_shapes_and_dtypes_equal_the_reference(shapes, dtypes, scale, max_norm, weight_decay, betas, made):
    options = {**OPTIONS, "max_norm": max_norm, "weight_decay": weight_decay, "betas": betas}
    check(lists(shapes, dtypes, scale, made), options)


def test_the_reference_is_clip_grad_norm_and_adamw():
    args = mapped(lists([(5, 3), (7,), ()]), lambda t: t.double().cpu())
    params = [nn.Parameter(p.clone()) for p in args[0]]
    torch_options = {key: value for key, value in OPTIONS.items() if key != "max_norm"}
    optimizer = torch.optim.AdamW(params, foreach=False, **torch_options)
    for param, grad, exp_avg, exp_avg_sq in zip(params, *args[1:4], strict=True):
        param.grad = grad.clone()
        optimizer.state[param] = {"step": torch.zeros(()), "exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone()}
    norm = clip_grad_norm_(params, OPTIONS["max_norm"])
    optimizer.step()
    torch.testing.assert_close(CLIP_ADAMW.reference(*args, **OPTIONS), norm)
    torch.testing.assert_close(args[0], [p.detach() for p in params])
    torch.testing.assert_close(args[2], [optimizer.state[p]["exp_avg"] for p in params])
    torch.testing.assert_close(args[3], [optimizer.state[p]["exp_avg_sq"] for p in params])


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1025])
def test_tensors_of_several_chunks_are_updated_to_the_last_entry(size):
    check(lists([(3,), (size,), (0,)]))


def test_addresses_may_be_odd():
    args = mapped(lists([(1001,), (64,)]), lambda t: t[1:] if t.ndim else t)
    check(args)


def test_any_dense_order_in_memory_will_do():
    args = lists([(2, 3, 4, 5), (6, 7)])
    args[:4] = mapped(
        args[:4], lambda t: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t.t().contiguous().t()
    )
    check(args)


def test_gradients_may_lie_in_another_order_and_the_plan_stays():
    args = lists([(6, 7), (3,)])
    plans = []
    for _ in range(3):
        args[1][0] = torch.randn(7, 6, device=DEVICE).t()
        check(args)
        plans.append(clip_adamw_tables._recent[0])
    assert plans[1] is plans[0]
    assert plans[2] is plans[0]


def test_no_copy_of_a_gradient_outlives_its_step(monkeypatch):
    copies = []

    def watched(lists):
        made = clip_adamw_tables.matching_order(lists)
        copies.extend(weakref.ref(g) for g in made.grads if all(g is not given for given in lists.grads))
        return made

    for module in ("clip_adamw", "clip_adamw_optimizer"):
        monkeypatch.setattr(f"forge_kernels.ops.{module}.matching_order", watched)
    args = lists([(6, 7), (3,)])
    args[1][0] = args[1][0].t().contiguous().t()
    clip_adamw(*args, **OPTIONS)
    net = network()
    optimizer = ClipAdamW(net.parameters())
    backward(net, 0)
    for param in net.parameters():
        if param.ndim == 2:
            param.grad = param.grad.t().contiguous().t()
    optimizer.step()
    assert optimizer._plan is not None
    assert len(copies) == 3
    assert not any(copy() is not None for copy in copies)


def test_parameters_with_gaps_go_to_the_reference():
    args = lists([(6, 8)])
    args[0] = [args[0][0][:, ::2]]
    args[1:4] = mapped(args[1:4], lambda t: t[:, :4].contiguous())
    assert "gaps" in str(CLIP_ADAMW.supports(*args, **OPTIONS))
    expected = mapped(args, torch.clone)
    assert torch.equal(clip_adamw(*args, **OPTIONS), CLIP_ADAMW.reference(*expected, **OPTIONS))
    assert same(flat(args), flat(expected))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("max_norm", [1.0, None])
def test_gradients_that_are_not_finite_do_what_they_do_in_torch(bad, max_norm):
    args = lists([(5,), (7,)])
    args[1][0][2] = bad
    check(args, {**OPTIONS, "max_norm": max_norm})


def test_squares_beyond_float32_have_an_infinite_norm():
    args = lists([(5,)], scale=1e25)
    assert clip_adamw(*args, **OPTIONS).isinf()


def test_no_tensors_have_norm_0():
    assert clip_adamw([], [], [], [], torch.zeros(()), **OPTIONS) == 0


def test_found_inf_leaves_everything_as_it_is():
    args = lists([(5,), (9,)], made=3.0)
    args[1][0][0] = float("nan")
    before = mapped(args, torch.clone)
    clip_adamw(*args, **OPTIONS, found_inf=torch.ones(1, device=DEVICE))
    assert same(flat(args), flat(before))
    clip_adamw(*args, **OPTIONS, found_inf=torch.zeros(1, device=DEVICE))
    assert args[4] == 4
    assert not same(flat(args), flat(before))


def test_each_tensor_can_have_its_own_counter():
    shared, own = (lists([(5,)] * 3) for _ in range(2))
    own[:4] = mapped(shared[:4], torch.clone)
    own[4] = [torch.tensor(float(n), device=DEVICE) for n in (0, 0, 50)]
    clip_adamw(*shared, **OPTIONS)
    check(own)
    assert shared[4] == 1
    assert [float(step) for step in own[4]] == [1, 1, 51]
    assert same(shared[0][:2], own[0][:2])
    assert not same(shared[0][2:], own[0][2:])


def test_a_shared_counter_counts_once_for_any_number_of_tensors(monkeypatch):
    from forge_kernels.triton import clip_adamw as triton_clip_adamw

    monkeypatch.setitem(triton_clip_adamw.SETTLE, "ROWS", 4)  # as many tensors at a time
    check(lists([(16,)] * 10))  # a lone entry may end so near to 0 that rounding is all of it


def test_a_rate_on_the_device_is_read_when_the_kernel_runs():
    args, rate = lists([(5,)]), torch.tensor(1e-2, device=DEVICE)
    check(args, {**OPTIONS, "lr": rate})
    rate.fill_(0.5)
    check(args, {**OPTIONS, "lr": rate})


def test_tensors_that_have_moved_are_found_again():
    args = lists([(5,), (4,)])
    check(args)
    args[1] = [grad.clone() for grad in args[1]]
    check(args)
    args[0][0].data = args[0][0].data.clone()
    check(args)
    args[1][0] = torch.randn(6, device=DEVICE)[:5].bfloat16()
    check(args)


def test_it_is_launched_where_the_tensors_are(monkeypatch):
    args = lists([(5,)])
    check_launches_where_the_tensors_are(monkeypatch, ops, lambda: clip_adamw(*args, **OPTIONS))


def test_the_same_gradients_give_the_same_bits():
    first = lists([(3 * CHUNK + 11,), (100, 7)])
    second = mapped(first, torch.clone)
    assert torch.equal(clip_adamw(*first, **OPTIONS), clip_adamw(*second, **OPTIONS))
    assert same(flat(first), flat(second))


def test_the_cost_is_32_bytes_for_a_parameter_in_float32():
    assert CLIP_ADAMW.cost(*lists([(5,), (3, 4)]), **OPTIONS).bytes == 32 * 17


def test_an_empty_parameter_may_have_any_strides():
    args = lists([(0, 0, 1), (3,)])
    args[2][0] = torch.empty_strided((0, 0, 1), (7, 5, 3), device=DEVICE)
    check(args, OPTIONS)
