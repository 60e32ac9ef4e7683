"""ClipAdamW, the optimizer, against torch's own clip_grad_norm_ and AdamW."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import forge
from forge.testing import TinyTask, fit_tiny
from forge_kernels.ops import clip_adamw_tables
from forge_kernels.ops.clip_adamw_optimizer import ClipAdamW
from forge_plugins import Guard
from forge_plugins.guard import takes_flag
from tests.support.clip_adamw_kit import assert_close, backward, both_step, groups, network, pair, same
from tests.support.kernel_kit import DEVICE


def test_clip_adamw_trains_as_torch_with_groups_and_schedule():
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


def test_nothing_is_sent_to_the_device_while_nothing_changes(monkeypatch):
    net = network()
    optimizer = ClipAdamW(groups(net), lr=1e-2)
    backward(net, 0)
    optimizer.step()
    plan = optimizer._plan
    assert plan is not None
    sent = []
    monkeypatch.setattr(clip_adamw_tables, "copied", lambda values, device: sent.append(values) or values.to(device))
    optimizer.step()
    assert optimizer._plan is plan
    assert not sent
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.step()
    assert optimizer._plan is plan
    assert len(sent) == 1
    assert sent[0].view(torch.float64)[0] == 0.3


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
    monkeypatch.setattr("forge_kernels.contract.INTERPRETED", False)
    results = [fit_tiny([Guard()], task=task)[0] for task in (Clipped(), ClippedByTorch())]
    assert same(*(task.parameters() for task in results))


def test_off_cuda_a_loss_scalers_flags_are_obeyed_too(monkeypatch):
    monkeypatch.setattr("forge_kernels.contract.INTERPRETED", False)
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
