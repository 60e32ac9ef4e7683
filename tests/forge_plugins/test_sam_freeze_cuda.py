"""sam and freeze on a CUDA device: nothing waits, and every bit is that of a hand-written loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.testing import TinyTask, assert_same, tiny_batches
from forge_plugins import SAM, Accumulate, Clip, Freeze, Guard

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


def loop(task: Any, train: Any, window: int, clip: float, *, rho: float | None = None, adaptive: bool = False) -> None:
    """Two epochs by hand, in the loop that one writes for a GPU; with `rho` each window is run twice."""
    task.cuda().train()
    optimizer = task.configure_optimizers()
    torch.manual_seed(0)
    for _ in range(2):
        for start in range(0, len(train), window):
            one_update(task, optimizer, train[start : start + window], clip, rho, adaptive)


def one_update(task: Any, optimizer: Any, micros: Any, clip: float, rho: float | None, adaptive: bool) -> None:
    random_numbers = torch.cuda.get_rng_state()
    backward(task, micros)
    if rho is not None:
        parameters = [p for p in task.parameters() if p.grad is not None]
        weights, buffers = [p.detach().clone() for p in parameters], [b.clone() for b in task.buffers()]
        climb(parameters, rho, adaptive)
        optimizer.zero_grad()
        torch.cuda.set_rng_state(random_numbers)
        backward(task, micros)
        with torch.no_grad():
            for tensor, before in zip([*parameters, *task.buffers()], [*weights, *buffers], strict=True):
                tensor.copy_(before)
    torch.nn.utils.clip_grad_norm_(task.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def backward(task: Any, micros: Any) -> None:
    for x, y in micros:
        loss = F.cross_entropy(task(x.cuda()), y.cuda())
        (loss / len(micros) if len(micros) > 1 else loss).backward()


@torch.no_grad()
def climb(parameters: list[nn.Parameter], rho: float, adaptive: bool) -> None:
    sizes = [p.abs() + 0.01 if adaptive else torch.ones_like(p) for p in parameters]
    scaled = [p.grad * size for p, size in zip(parameters, sizes, strict=True) if p.grad is not None]
    length = rho / (torch.nn.utils.get_total_norm(scaled) + 1e-12)
    for parameter, size, gradient in zip(parameters, sizes, scaled, strict=True):
        parameter.add_(gradient * size * length)


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
    theirs = Fused()
    loop(theirs, batches(), window, 0.5, rho=0.5, adaptive=adaptive)
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
