"""clip_adamw and ClipAdamW against torch's own clip_grad_norm_ and AdamW."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import forge
from forge.errors import KernelError
from forge.kernels.ops.clip_adamw import CLIP_ADAMW, clip_adamw, clip_adamw_op
from forge.kernels.ops.clip_adamw_optimizer import ClipAdamW
from forge.kernels.ops.multi_tensor import CHUNK
from forge.testing import TinyTask, fit_tiny
from forge_plugins import Guard
from forge_plugins.guard import takes_flag
from tests.kernel_kit import DEVICE, distance, poisoned_memory

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0}
FULL = (torch.float32,) * 3
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
shapes = st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=1, max_size=5)


def lists(shapes, dtypes=FULL, scale=1.0, made=0.0) -> list[Any]:
    """Parameters, gradients, both moments, one step counter."""
    param, grad, state = dtypes
    return [
        [torch.randn(shape, device=DEVICE).to(param) for shape in shapes],
        [(torch.randn(shape, device=DEVICE) * scale).to(grad) for shape in shapes],
        [(torch.randn(shape, device=DEVICE) * scale).to(state) for shape in shapes],
        [(torch.rand(shape, device=DEVICE) * scale**2).to(state) for shape in shapes],
        torch.tensor(made, device=DEVICE),
    ]


def mapped(args, function):
    return [[function(t) for t in arg] if isinstance(arg, (list, tuple)) else function(arg) for arg in args]


def flat(args) -> list[Tensor]:
    return [t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else [arg])]


def check(args, options=OPTIONS, tolerance=None) -> None:
    """As near to the reference in float64 as the contract says; gradients are not touched."""
    bound = max(CLIP_ADAMW.tolerance[t.dtype] for t in flat(args)) if tolerance is None else tolerance
    assert CLIP_ADAMW.supports(*args, **options) is None, "the reference would run: this would test nothing"
    exact = mapped(args, lambda t: t.detach().double())
    norm = CLIP_ADAMW.reference(*exact, **options)
    grads = mapped([args[1]], torch.clone)[0]
    with poisoned_memory():
        result = clip_adamw(*args, **options)
    for place, (found, right) in enumerate(zip([result, *flat(args)], [norm, *flat(exact)], strict=True)):
        off = distance(found, right)
        assert off <= bound, f"tensor {place} is off by {off:.1e}"
    assert same(args[1], grads)


def same(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0)) for a, b in zip(first, second, strict=True))


# -- the function -----------------------------------------------------------------------------------------------------


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


def test_gradients_may_lie_in_another_order():
    args = lists([(6, 7), (3,)])
    args[1][0] = args[1][0].t().contiguous().t()
    for _ in range(2):
        check(args)


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


def test_gradients_whose_squares_leave_float32_have_an_infinite_norm():
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


def test_a_shared_counter_counts_once_for_any_number_of_tensors():
    check(lists([(1,)] * 130))


def test_a_learning_rate_on_the_device_is_read_when_the_kernel_runs():
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


def test_the_same_gradients_give_the_same_bits():
    first = lists([(3 * CHUNK + 11,), (100, 7)])
    second = mapped(first, torch.clone)
    assert torch.equal(clip_adamw(*first, **OPTIONS), clip_adamw(*second, **OPTIONS))
    assert same(flat(first), flat(second))


def test_autograd_knows_that_parameters_have_changed():
    args = lists([(5,)])
    args[0][0].requires_grad_()
    loss = args[0][0].square().sum()
    clip_adamw(*args, **OPTIONS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("trained", [False, True])
def test_compiles_whole(trained):
    args = lists([(5,), (3, 4)])
    args[0] = [p.requires_grad_(trained) for p in args[0]]
    expected = mapped(args, lambda t: t.detach().clone())
    norm = clip_adamw(*expected, **OPTIONS)
    torch.compiler.reset()
    compiled = torch.compile(clip_adamw, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args, **OPTIONS), norm)
    assert same(flat(args), flat(expected))


def test_the_operator_is_registered_as_torch_asks():
    args = lists([(5,), (3, 4)])
    torch.library.opcheck(clip_adamw_op, (*args[:4], [args[4]], None, 1e-2, 0.9, 0.999, 1e-8, 0.1, 1.0, None))


def test_the_cost_is_32_bytes_for_a_parameter_in_float32():
    assert CLIP_ADAMW.cost(*lists([(5,), (3, 4)]), **OPTIONS).bytes == 32 * 17


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grads": []}, "1 parameters, 0 gradients"),
        ({"grads": [torch.ones(4)]}, r"parameter 0.*\(5,\), \(4,\), \(5,\), \(5,\)"),
        ({"step": [torch.zeros(())] * 2}, "2 step counters"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\)"),
        ({"max_norm": -1.0}, "max_norm is -1.0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(change, message):
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "step")
    arguments = {**dict(zip(names, lists([(5,)]), strict=True)), **OPTIONS, **change}
    with pytest.raises(KernelError, match=message):
        clip_adamw(**arguments)


# -- the optimizer ----------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3)).to(DEVICE)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in net.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 2e-2, "weight_decay": 0.0},
    ]


def pair(max_norm: float = 0.5, **options: Any) -> tuple[nn.Module, ClipAdamW, nn.Module, torch.optim.AdamW]:
    ours, theirs = network(), network()
    return (
        *(ours, ClipAdamW(groups(ours), lr=1e-2, max_norm=max_norm, **options)),
        *(theirs, torch.optim.AdamW(groups(theirs), lr=1e-2, fused=True, **options)),
    )


def backward(net: nn.Module, batch: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(batch)
    net.zero_grad()
    (net(torch.randn(4, 6, generator=generator).to(DEVICE)).square().sum() * scale).backward()


def both_step(ours, optimizer, theirs, right, batch: int) -> Tensor:
    for net in (ours, theirs):
        backward(net, batch)
    optimizer.step()
    norm = clip_grad_norm_(theirs.parameters(), optimizer.max_norm)
    right.step()
    return norm


def assert_close(ours: nn.Module, theirs: nn.Module, **tolerance: float) -> None:
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), **tolerance)


def test_clip_adamw_trains_as_torch_does_with_groups_and_a_schedule():
    ours, optimizer, theirs, right = pair()
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)) for o in (optimizer, right)]
    for batch in range(5):
        norm = both_step(ours, optimizer, theirs, right, batch)
        torch.testing.assert_close(optimizer.total_norm, norm)
        for schedule in schedules:
            schedule.step()
    assert_close(ours, theirs)
    assert optimizer._plan is not None, "torch's own functions ran"


def test_a_tensor_as_learning_rate_drives_all_groups():
    rates = [torch.tensor(1e-2, device=DEVICE) for _ in range(2)]
    ours, theirs = network(), network()
    optimizer = ClipAdamW(ours.parameters(), lr=rates[0], max_norm=0.5)
    right = torch.optim.AdamW(theirs.parameters(), lr=rates[1], fused=True)
    for batch in range(3):
        both_step(ours, optimizer, theirs, right, batch)
        for rate in rates:
            rate.mul_(0.5)
    assert_close(ours, theirs)


def test_parameters_without_gradients_wait_with_their_counters():
    ours, optimizer, theirs, right = pair()
    for batch in range(4):
        for net in (ours, theirs):
            net[0].requires_grad_(batch % 2 == 0)
        both_step(ours, optimizer, theirs, right, batch)
    assert_close(ours, theirs)
    assert sorted(float(state["step"]) for state in optimizer.state.values()) == [2, 2, 4, 4]


def test_nothing_is_sent_to_the_device_while_nothing_changes():
    net = network()
    optimizer = ClipAdamW(groups(net), lr=1e-2)
    backward(net, 0)
    optimizer.step()
    plan = optimizer._plan
    assert plan is not None
    sent = plan.tensors.there, plan.settings.table().there
    optimizer.step()
    assert optimizer._plan is plan
    assert (plan.tensors.there, plan.settings.table().there) == sent
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.step()
    assert plan.tensors.there is sent[0]
    assert plan.settings.table().there is not sent[1]


def test_state_goes_to_torchs_adamw_and_back():
    ours, optimizer, theirs, right = pair()
    both_step(ours, optimizer, theirs, right, 0)
    assert optimizer.state_dict().keys() == right.state_dict().keys()
    assert optimizer.state_dict()["state"][0].keys() == right.state_dict()["state"][0].keys()
    plain = torch.optim.AdamW(groups(theirs), lr=1.0)
    plain.load_state_dict(optimizer.state_dict())
    foreach = torch.optim.AdamW(groups(theirs), lr=1.0, foreach=True)
    backward(theirs, 0)
    foreach.step()
    optimizer.load_state_dict(copy.deepcopy(foreach.state_dict()))
    assert all(group["fused"] and group["capturable"] for group in optimizer.param_groups)
    assert all(state["step"].device.type == DEVICE for state in optimizer.state.values())
    right.load_state_dict(foreach.state_dict())
    ours.load_state_dict(theirs.state_dict())
    both_step(ours, optimizer, theirs, right, 1)
    assert_close(ours, theirs)


def test_a_copy_clips_as_its_original():
    net = network()
    optimizer = copy.deepcopy(ClipAdamW(net.parameters(), max_norm=0.25))
    assert optimizer.max_norm == 0.25
    assert optimizer._step_supports_amp_scaling


def test_state_that_was_replaced_is_found():
    ours, optimizer, theirs, right = pair()
    both_step(ours, optimizer, theirs, right, 0)
    for o in (optimizer, right):
        o.state.clear()
    both_step(ours, optimizer, theirs, right, 1)
    assert_close(ours, theirs)


def test_a_loss_scalers_flags_are_obeyed():
    ours, optimizer, theirs, right = pair()
    both_step(ours, optimizer, theirs, right, 0)
    before = copy.deepcopy(ours)
    backward(ours, 1, scale=8.0)
    optimizer.grad_scale = torch.tensor([8.0], device=DEVICE)
    optimizer.found_inf = torch.tensor([1.0], device=DEVICE)
    optimizer.step()
    assert_close(ours, before, rtol=0, atol=0)
    optimizer.found_inf.zero_()
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    backward(theirs, 1)
    norm = clip_grad_norm_(theirs.parameters(), 0.5)
    right.step()
    torch.testing.assert_close(optimizer.total_norm, norm)
    assert_close(ours, theirs)


def test_the_guard_can_tell_it_to_leave_an_update_out():
    assert takes_flag(ClipAdamW(network().parameters()), next(network().parameters()).device)


class Clipped(TinyTask):
    """forge's tiny task, trained by ClipAdamW."""

    def configure_optimizers(self) -> Any:
        return ClipAdamW(self.parameters(), lr=1e-2, max_norm=0.1)


class ClippedByTorch(TinyTask):
    """The same by torch's two functions."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    @forge.hookimpl
    def forge_edit_grads(self, step: forge.Step) -> None:
        clip_grad_norm_(self.parameters(), 0.1)


def test_off_cuda_it_is_torchs_two_functions_bit_for_bit(monkeypatch):
    monkeypatch.setattr("forge.kernels.contract.INTERPRETED", False)
    results = [fit_tiny([Guard()], task=task)[0] for task in (Clipped(), ClippedByTorch())]
    assert same(*(task.parameters() for task in results))


def test_off_cuda_a_loss_scalers_flags_are_obeyed_too(monkeypatch):
    monkeypatch.setattr("forge.kernels.contract.INTERPRETED", False)
    task, right = Clipped(), Clipped()
    right.load_state_dict(task.state_dict())
    optimizers = [ClipAdamW(t.parameters(), max_norm=0.1) for t in (task, right)]
    optimizers[0].grad_scale = torch.tensor(8.0)
    for t, scale in ((task, 8.0), (right, 1.0)):
        (sum(p.square().sum() for p in t.parameters()) * scale).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert same(task.parameters(), right.parameters())
    assert torch.equal(optimizers[0].total_norm, optimizers[1].total_norm)
    optimizers[0].found_inf = torch.ones(())
    optimizers[0].step()
    assert same(task.parameters(), right.parameters())


def test_a_closure_is_called_with_gradients_on():
    net = network()
    optimizer = ClipAdamW(net.parameters())

    def closure() -> Tensor:
        backward(net, 0)
        return torch.ones(()).requires_grad_() * 2

    assert optimizer.step(closure).requires_grad


def test_a_negative_norm_is_refused():
    with pytest.raises(KernelError, match=r"max_norm is -1\.0"):
        ClipAdamW(network().parameters(), max_norm=-1.0)
