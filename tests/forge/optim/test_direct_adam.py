"""The direct step of Adam and AdamW: torch's bits, and nothing that somebody watches is passed by."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook

import forge
from forge.optim.direct_adam import DirectAdam
from forge.testing import TinyTask, fit_tiny


def made(kind: type[Adam] = Adam, **options: Any) -> tuple[nn.Module, Adam]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    groups = [{"params": net[0].parameters(), "lr": 0.02}, {"params": net[2].parameters(), "weight_decay": 0.1}]
    return net, kind(groups, lr=0.01, **options)


def draw(net: nn.Module, update: int, without: str = "") -> None:
    generator = torch.Generator().manual_seed(update)
    for name, parameter in net.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if name == without else gradient


def stepped(net: nn.Module, optimizer: Adam, direct: bool, without: str = "") -> int:
    """Eight updates under a schedule; return how many were direct."""
    schedule, way, count = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), DirectAdam.of(optimizer), 0
    assert way is not None
    for update in range(8):
        draw(net, update, without if update == 5 else "")
        if direct and way.step():
            count += 1
        else:
            optimizer.step()
        schedule.step()
    return count


@given(
    kind=st.sampled_from([Adam, AdamW]),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    how=st.sampled_from([{}, {"foreach": True}, {"foreach": False}, {"fused": True}]),
    without=st.sampled_from(["", "0.bias"]),
)
@settings(max_examples=20, deadline=None)
def test_the_bits_are_those_of_torchs_step(
    kind: type[Adam], amsgrad: bool, maximize: bool, how: dict[str, bool], without: str
) -> None:
    options = {"amsgrad": amsgrad, "maximize": maximize, **how}
    ours, theirs = made(kind, **options), made(kind, **options)
    assert stepped(*ours, direct=True, without=without) == 7
    stepped(*theirs, direct=False, without=without)
    for mine, right in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(mine, right)
    pairs = zip(ours[1].state.values(), theirs[1].state.values(), strict=True)
    assert all(torch.equal(a[key], b[key]) for a, b in pairs for key in b)


def test_a_flag_of_the_device_skips_the_update() -> None:
    net, optimizer = made(AdamW, fused=True)
    draw(net, 0)
    optimizer.step()
    before = copy.deepcopy(net.state_dict())
    optimizer.found_inf = torch.ones(())  # pyright: ignore[reportAttributeAccessIssue]
    way = DirectAdam.of(optimizer)
    assert way is not None
    assert way.step()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(state["step"] == 1 for state in optimizer.state.values())


def own_step(optimizer: Adam) -> Any:
    own = optimizer.step
    optimizer.step = lambda closure=None: own(closure)  # pyright: ignore[reportAttributeAccessIssue]


def with_schedule_over_own_step(optimizer: Adam) -> Any:
    own = optimizer.step

    def mine(self: Any, closure: Any = None) -> Any:
        return own(closure)

    optimizer.step = mine.__get__(optimizer)  # pyright: ignore[reportAttributeAccessIssue]
    torch.optim.lr_scheduler.StepLR(optimizer, 3)


WATCHES: dict[str, Callable[[Adam], Any]] = {
    "pre hook": lambda optimizer: optimizer.register_step_pre_hook(lambda *args: None),
    "post hook": lambda optimizer: optimizer.register_step_post_hook(lambda *args: None),
    "global hook": lambda optimizer: register_optimizer_step_post_hook(lambda *args: None),
    "step of its own": own_step,
    "schedule over it": with_schedule_over_own_step,
}


@pytest.mark.parametrize("watch", WATCHES.values(), ids=list(WATCHES))
def test_who_watches_a_step_sees_it(watch: Callable[[Adam], Any]) -> None:
    net, optimizer = made()
    way = DirectAdam.of(optimizer)
    assert way is not None
    draw(net, 0)
    optimizer.step()
    assert way.step()
    handle = watch(optimizer)
    try:
        assert not way.step()
    finally:
        if handle is not None:
            handle.remove()


def test_a_profiler_sees_the_step() -> None:
    net, optimizer = made()
    way = DirectAdam.of(optimizer)
    assert way is not None
    draw(net, 0)
    optimizer.step()
    with torch.autograd.profiler.profile():
        assert not way.step()
    assert way.step()


def test_a_class_that_was_changed_is_stepped_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Adam):
        pass

    assert DirectAdam.of(Own([nn.Parameter(torch.ones(2))])) is None
    net, optimizer = made()
    way = DirectAdam.of(optimizer)
    assert way is not None
    draw(net, 0)
    optimizer.step()
    monkeypatch.setattr(Adam, "step", lambda self, closure=None: None)
    assert not way.step()
    assert DirectAdam.of(optimizer) is None


def test_capturable_and_complex_ones_step_by_themselves() -> None:
    numbers = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = Adam([numbers])
    numbers.grad = torch.ones_like(numbers)
    way = DirectAdam.of(optimizer)
    assert way is not None
    optimizer.step()
    assert not way.step()


def test_a_run_steps_directly_from_its_second_update(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    real = DirectAdam.step
    monkeypatch.setattr(DirectAdam, "step", lambda self: called.append(real(self)) or called[-1])

    class WithAdam(TinyTask):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    fit_tiny([], task=WithAdam(), max_updates=4)
    assert called == [False, True, True, True]


def test_a_step_that_is_replaced_in_a_run_is_seen() -> None:
    seen: list[int] = []

    class WithAdam(TinyTask):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    @forge.on("step_end")
    def replace(step: forge.Step) -> None:
        if step.index == 1:
            optimizer: Any = step.optimizer
            own = optimizer.step
            optimizer.step = lambda: (seen.append(step.trainer.progress.update), own())[1]

    fit_tiny([replace], task=WithAdam(), max_updates=4)
    assert seen == [2, 3]
