"""sam and freeze on a CUDA device: nothing waits, and every bit is that of a hand-written loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forge
from forge.testing import TinyTask, assert_same, tiny_batches
from forge_plugins import SAM, Accumulate, Clip, Freeze, Guard
from tests.support import reference
from tests.support.averages import loss_of

pytestmark = pytest.mark.gpu

DEFAULT, ERROR = 0, 2
"""What torch.cuda.get_sync_debug_mode() says."""


def noting(modes: list[int]) -> Any:
    """A callback that writes down, after each update, how host syncs were treated in it."""

    @forge.on("step_end")
    def note(step: forge.Step) -> None:
        modes.append(torch.cuda.get_sync_debug_mode())

    return note


class Fused(TinyTask):
    """Dropout drawn on the device, batch normalisation, a fused optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, fused=True)


def batches(count: int = 8, size: int = 8) -> list[Any]:
    return [(x.pin_memory(), y.pin_memory()) for x, y in tiny_batches([size] * count)]


def fit(plugins: list[Any], task: Any = None, train: Any = None, **options: Any) -> Any:
    settings = {"seed": 0, "device": "cuda", "run_dir": False, "log_every": 1000, "max_epochs": 2, **options}
    task = task or Fused()
    forge.Trainer(plugins=plugins, **settings).fit(task, train or batches())
    return task


# -- sam --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_sam_waits_for_nothing(adaptive: bool, window: int, syncs_are_errors: forge.Plugin) -> None:
    modes: list[int] = []
    plugins = [SAM(0.5, adaptive=adaptive), Guard(), Clip(0.1), Accumulate(window), noting(modes), syncs_are_errors]
    fit(plugins, train=batches(30), max_epochs=None, max_updates=8)
    assert modes == [DEFAULT] + 7 * [ERROR]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_sam_equals_a_hand_written_loop_bit_for_bit(adaptive: bool, window: int) -> None:
    ours = fit([SAM(0.5, adaptive=adaptive), Clip(0.5), Accumulate(window)])
    theirs = Fused().cuda()
    levers = reference.Levers(window=window, clip_norm=0.5, rho=0.5, adaptive=adaptive)
    data = [(x.cuda(), y.cuda()) for x, y in batches()]
    reference.train_with_levers(theirs, loss_of, theirs.configure_optimizers(), data, 2, levers, 0)
    assert_same(ours, theirs)


# -- freeze -----------------------------------------------------------------------------------------------------------


def test_freezing_and_thawing_wait_for_nothing(syncs_are_errors: forge.Plugin) -> None:
    thaw = {"net.0": "3 updates", "net.1": "5 updates"}
    modes: list[int] = []
    plugins = [Freeze("net.[01]", thaw=thaw), Clip(0.1), noting(modes), syncs_are_errors]
    task = fit(plugins, train=batches(30), max_epochs=None, max_updates=8)
    assert modes == [DEFAULT] + 7 * [ERROR]
    torch.cuda.set_sync_debug_mode("default")
    assert all(
        not torch.equal(p.cpu(), start) for p, start in zip(task.parameters(), Fused().parameters(), strict=True)
    )
