"""ema alone: decay, warm-up, interval and buffers. What it shares with swa is in test_averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import forge
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import EMA, Checkpoint
from tests.support.averages import Watched, applied, by_hand, ema_of, parameters, train


@given(
    decay=st.floats(0, 0.99),
    start=st.integers(0, 12),
    every=st.integers(1, 4),
    warmup=st.booleans(),
)
def test_start_every_and_warmup_are_what_a_plain_loop_does(decay: float, start: int, every: int, warmup: bool) -> None:
    plugin = EMA(decay, start=start, every=every, warmup=warmup)
    task, _ = fit_tiny([plugin])
    expected: list[Tensor] = []
    model, n = TinyTask(), 0

    def average(update: int) -> None:
        nonlocal n
        if update <= start or update % every:
            return
        now = [p.detach().clone() for p in model.parameters()]
        if not expected:
            expected.extend(now)
        else:
            used = min(decay, (1 + n) / (10 + n)) if warmup else decay
            for mean, value in zip(expected, now, strict=True):
                mean.lerp_(value, 1 - used)
        n += 1

    train(model, average)
    if not expected:
        with pytest.raises(forge.ForgeError, match=r"ema has averaged nothing yet.*ema\.start"):
            plugin.apply_to(task)
        return
    names = [name for name, _ in model.named_parameters()]
    assert_same(parameters(applied(plugin, task)), dict(zip(names, expected, strict=True)))


@pytest.mark.parametrize(("start", "updates"), [(0.5, 5), ("5 updates", 5), ("1 epoch", 5), (0.0, 0)])
def test_the_start_can_be_updates_a_share_or_an_interval(start: Any, updates: int) -> None:
    plugin = EMA(0.9, start=start)
    task, _ = fit_tiny([plugin])
    assert_same(applied(plugin, task), by_hand(ema_of, lambda update: update > updates).module)


# -- buffers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_buffers_are_the_live_ones_or_averaged_like_weights(buffers: Any) -> None:
    plugin = EMA(0.7, buffers=buffers)
    task, _ = fit_tiny([plugin])
    mean = by_hand(lambda model: AveragedModel(model, multi_avg_fn=floats_only(0.7), use_buffers=True))
    averaged = applied(plugin, task).state_dict()
    expected = mean.module.state_dict() if buffers == "average" else task.state_dict()
    for name in ("net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked"):
        assert torch.equal(averaged[name], expected[name])


def floats_only(decay: float) -> Any:
    """torch's average, but what is no float is copied."""
    average = get_ema_multi_avg_fn(decay)

    def update(means: list[Tensor], now: list[Tensor], count: Any) -> None:
        if means[0].is_floating_point():
            average(means, now, count)
        else:
            torch._foreach_copy_(means, now)

    return update


class Recentred(TinyTask):
    """Puts another tensor in the place of its buffer at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(6))

    def training_step(self, batch: Any) -> Any:
        self.centre = self.centre * 0.5 + batch[0].mean(0) * 0.5
        return super().training_step((batch[0] - self.centre, batch[1]))


def test_a_buffer_that_is_replaced_is_averaged_all_the_same() -> None:
    plugin = EMA(0.5, buffers="average")
    task, _ = fit_tiny([plugin], task=Recentred())
    centre, mean = torch.zeros(6), None
    for x, _ in tiny_batches() * 2:
        centre = centre * 0.5 + x.mean(0) * 0.5
        mean = centre.clone() if mean is None else mean.lerp_(centre, 0.5)
    assert mean is not None
    assert torch.equal(applied(plugin, task).state_dict()["centre"], mean)
    assert torch.equal(task.state_dict()["centre"], centre)


def test_validation_is_of_the_average_with_the_live_buffers() -> None:
    task = Watched()
    fit_tiny([EMA(0.9)], task=task)
    assert_same(task.seen[-1], by_hand(ema_of).module)


class Replacing(TinyTask):
    """Puts another tensor in the place of its buffer at every forward of an evaluation, and of training if asked."""

    calls: Tensor

    def __init__(self, in_training: bool) -> None:
        super().__init__()
        self.in_training = in_training
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_training or not self.training:
            self.calls = self.calls + 1
        return super().forward(x)


@pytest.mark.parametrize("in_training", [True, False])
@pytest.mark.parametrize("start", [0, 7])
def test_a_buffer_that_an_evaluation_replaces_is_put_back(tmp_path: Path, in_training: bool, start: int) -> None:
    task, plain = Replacing(in_training), Replacing(in_training)
    memory, plugin = task.calls, EMA(0.9, start=start, buffers="average")
    fit_tiny([plugin], task=task, run_dir=tmp_path)
    fit_tiny([], task=plain)
    assert_same(parameters(task), parameters(plain))
    unseen = 5 if start else 0  # the validation before the average began is one of the trained weights
    assert task.calls.item() == (10 if in_training else 0) + unseen
    assert (task.calls is memory) == (not in_training and not start)
    fresh = Replacing(in_training)
    plugin.apply_to(fresh)
    assert_same(fresh, load_file(tmp_path / "weights.safetensors"))


def test_a_run_with_other_buffers_takes_what_there_is(tmp_path: Path) -> None:
    plugin = EMA(0.9)
    for updates, buffers in ((3, "copy"), (6, "average"), (9, "copy")):
        plugin = EMA(0.9, buffers=buffers)
        fit_tiny([plugin, Checkpoint()], run_dir=tmp_path, max_updates=updates, resume="auto")
    assert "net.1.running_mean" not in plugin._average.tensors
    assert plugin._average.count == 9


# -- what is told -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"decay": 0.99}, True),
        ({"decay": 0.99, "warmup": True}, False),
        ({"decay": 0.8}, False),
        ({"decay": 0.8, "every": 3}, True),
        ({"decay": 0.8, "start": 7}, True),
        ({"decay": 0.99, "start": 10}, False),
    ],
)
def test_an_average_that_the_run_is_too_short_for_is_told(
    options: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fit_tiny([EMA(**options)])
    assert ("set ema.warmup=true, or a smaller decay" in caplog.text) == warned


@pytest.mark.parametrize(("start", "warned"), [(9, False), (10, True), ("2 epochs", True), (0.9, False)])
def test_a_start_that_the_run_never_reaches_is_told_at_once(
    start: Any, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fit_tiny([EMA(start=start, warmup=True)])
    assert ("nothing will be averaged" in caplog.text) == warned
