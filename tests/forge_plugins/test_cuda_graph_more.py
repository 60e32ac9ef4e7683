"""cuda_graph for several optimizers, for updates that are captured in part, and for many shapes; on emulated graphs.

tests/forge_plugins/test_cuda_graph_more_cuda.py says the same of real graphs.
"""

from __future__ import annotations

import itertools
import logging
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge.errors import NonFiniteError
from forge.testing import assert_same
from forge_plugins import (
    AMP,
    EMA,
    JSONL,
    Accumulate,
    Checkpoint,
    Clip,
    CudaGraph,
    Guard,
    Schedule,
)
from forge_plugins import cuda_graph as module
from tests.forge.snapshot.test_resume import ends_as_if_it_had_not_been_cut
from tests.forge_plugins.test_guard import LateGuard
from tests.support.emulated_graphs import RUNNING, Net, OnADevice, Shrink, batches, compare, emulate, run
from tests.support.profiles import some


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


# -- several optimizers -----------------------------------------------------------------------------------------------


class GAN(forge.TaskModule):
    """Two optimizers that take turns; one of them rests every third update if `rests`."""

    rests = False

    def __init__(self, kind: str = "AdamW") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.kind = kind

    def training_step(self, batch: Any, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        made = self.generator(batch[0])
        if name == "generator":
            return {"loss": F.softplus(-self.critic(made)).mean(), "size": made.detach().abs().mean()}
        real, false = self.critic(batch[0]), self.critic(made.detach())
        return {"loss": (F.softplus(-real) + F.softplus(false)).mean(), "gap": (real - false).detach().mean()}

    def takes_turn(self, name: str, update: int) -> bool:
        return not self.rests or name == "critic" or update % 3 != 0

    def configure_optimizers(self) -> Any:
        make = getattr(torch.optim, self.kind)
        parts = {"critic": self.critic, "generator": self.generator}
        return {name: make(part.parameters(), lr=2.0**-7, fused=True) for name, part in parts.items()}


class Noise(forge.Plugin):
    """Changes a batch by random numbers, once for all turns."""

    capturable = True

    @forge.hookimpl(wrapper=True)
    def forge_prepare_batch(self, step: forge.Step) -> Any:
        batch = yield
        return (batch[0] + torch.randn_like(batch[0]), batch[1]) if step.stage == "train" else batch


TURNS = {
    "nothing": lambda: [],
    "clip": lambda: [Shrink()],
    "noise": lambda: [Noise(), Shrink()],
    "all": lambda: [Noise(), AMP("bf16"), Accumulate(2), Shrink(), EMA(0.9)],
}


@pytest.mark.parametrize("name", some(reversed(TURNS)))
def test_each_turn_of_several_optimizers_has_its_graph(name: str) -> None:
    graph = compare(TURNS[name], 10, task=GAN)
    assert graph.replayed in (33, 15)


def test_a_turn_that_begins_late_is_captured_late() -> None:
    class Late(GAN):
        def takes_turn(self, name: str, update: int) -> bool:
            return name == "critic" or update >= 15

    compare(lambda: [Shrink()], 30, task=Late)


class CapturedGuard(LateGuard):
    """guard as it works on a CUDA device: its check is a part of the graph, and the host hears of it late."""

    @forge.hookimpl
    def forge_start(self, trainer: forge.Trainer) -> None:
        super().forge_start(trainer)
        assert self._flag is not None
        self.capturable, self._flag.is_captured = True, lambda: RUNNING["in_graph"]
        RUNNING["others"].append(self._flag._both)


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("bad", some([8, 1, 4, 15]))
def test_guard_names_the_update_of_a_captured_turn(bad: int, rests: bool) -> None:
    class Late(GAN):
        def takes_turn(self, name: str, update: int) -> bool:
            return name == "critic" or update >= 6 if rests else True

    data = batches(20)
    data[bad][0][0, 0] = math.nan
    task, before = Late(), Late()
    with pytest.raises(NonFiniteError, match=rf"Update {bad} \(epoch 0\): the loss is not finite"):
        run([CapturedGuard(), Shrink(), CudaGraph(strict=True)], data, task, max_epochs=1)
    run([Shrink()], data, before, max_epochs=None, max_updates=bad)
    assert_same(dict(task.named_parameters()), dict(before.named_parameters()))


# -- a part of an update ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "what"), [("SGD", "momentum"), ("AdamW", "betas")])
def test_the_step_of_a_moving_momentum_stays_outside(kind: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    with caplog.at_level("INFO", logger="forge"):
        compare(lambda: [Schedule("one_cycle", warmup=5), Shrink()], 33, task=lambda: Net(kind, **options))
    assert f"the optimizer's step runs outside of the graph, because OneCycleLR changes the optimizer's {what}" in (
        caplog.text
    )


class Own(torch.optim.Optimizer):
    """An optimizer that decides on the host."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.abs().max().item() > 1e-3:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def test_an_optimizer_that_cannot_be_captured_stays_outside(caplog: pytest.LogCaptureFixture) -> None:
    class Task(Net):
        def configure_optimizers(self) -> Any:
            return Own(self.parameters())

    with caplog.at_level("INFO", logger="forge"):
        compare(lambda: [Accumulate(2), Shrink(), EMA(0.9)], 15, task=Task)
    assert "the optimizer's step runs outside of the graph, because Own has no option `capturable`" in caplog.text


def test_hooks_that_read_the_device_stay_outside(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="forge"):
        compare(lambda: [Guard("skip"), Shrink(), EMA(0.9)], 33)
    assert "hooks and the optimizer's step run outside of the graph, because 'guard' acts inside" in caplog.text


@pytest.mark.parametrize(("call", "rest"), some([(6, "the optimizer's step runs"), (5, "gradient hooks and")]))
def test_a_late_turn_that_reads_the_device_is_captured_in_part(
    call: int, rest: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first turn has its graph by then. Each look at a turn has three parts."""
    calls = itertools.count(1)
    monkeypatch.setattr(module, "reads_of_the_device", lambda: nullcontext(["here"] if next(calls) == call else []))

    class Late(GAN):
        def takes_turn(self, name: str, update: int) -> bool:
            return name == "critic" or update >= 8

    with caplog.at_level("INFO", logger="forge"):
        compare(lambda: [Shrink()], 25, task=Late)
    assert rest in caplog.text
    assert "the device at here" in caplog.text


def test_guard_skips_an_update_whose_window_was_replayed() -> None:
    data = batches()
    data[7][0][0, 0] = math.nan
    compare(lambda: [Guard("skip"), Shrink(), Schedule("cosine")], 33, data)


# -- fp16 -------------------------------------------------------------------------------------------------------------


class Spikes(Net):
    """Some batches overflow in float16, once scaled."""

    def training_step(self, batch: Any) -> Any:
        out = super().training_step(batch)
        return {**out, "loss": out["loss"] * torch.where(batch[0][0, 0] > 1, 1e4, 1.0)}


HALVES = {
    "nothing": lambda: [AMP("fp16", init_scale=2.0**18)],
    "clip": lambda: [AMP("fp16", init_scale=2.0**20, growth_interval=3), Clip(0.1), EMA(0.9)],
    "all": lambda: [AMP("fp16", init_scale=2.0**30), Accumulate(2), Clip(0.1), Schedule("cosine"), Guard()],
}


@pytest.mark.parametrize("stack", some(HALVES.values(), quick=1), ids=HALVES.keys())
def test_a_loss_scaler_skips_what_it_skips_without_graphs(stack: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="forge"):
        compare(stack, 15, task=Spikes)
    told = [line for line in caplog.messages if "skipped in this run" in line]
    assert len(told) == 2
    assert len(set(told)) == 1  # the same number, with and without


# -- remat ------------------------------------------------------------------------------------------------------------


class Blocks(forge.TaskModule):
    """Two equal blocks with dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh()) for _ in range(2)]
        self.blocks, self.head = nn.ModuleList(parts), nn.Linear(6, 3)

    def training_step(self, batch: Any) -> Any:
        hidden: Tensor = batch[0]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return {"loss": F.cross_entropy(self.head(hidden), batch[1])}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2.0**-7, fused=True)


# -- many shapes ------------------------------------------------------------------------------------------------------


def of_sizes(sizes: list[int]) -> list[Any]:
    make = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 6, generator=make), torch.randint(3, (n,), generator=make)) for n in sizes]


def replayed(data: list[Any], graphs: int) -> int:
    graph, plain = CudaGraph(graphs=graphs), run([Shrink()], data, max_epochs=1)
    ours = run([Shrink(), graph], data, max_epochs=1)
    assert_same(ours[0], plain[0])
    assert ours[1] == plain[1]
    return graph.replayed


@pytest.mark.slow
@pytest.mark.parametrize("graphs", some([2, 1]))
def test_a_graph_that_is_no_longer_used_makes_room(graphs: int) -> None:
    """Lengths that grow, as in a curriculum: each gets a graph in its turn."""
    data = of_sizes([size for size in (4, 5, 6, 7) for _ in range(30)])
    assert replayed(data, graphs) == 120 - 3 - (graphs - 1) - (4 - graphs) * 15


# -- resumed ----------------------------------------------------------------------------------------------------------


LIVES = {
    "accumulated": (lambda: [Accumulate(2), Shrink(), Schedule("cosine", warmup=3)], Net),
    "turns": (lambda: [Noise(), Shrink(), Schedule("cosine", warmup=3)], GAN),
    "outside": (lambda: [Shrink(), Schedule("one_cycle", warmup=3)], Net),
    "fp16": (lambda: [AMP("fp16", init_scale=2.0**18), Clip(0.1), Schedule("cosine")], Spikes),
}


@pytest.mark.slow
@pytest.mark.parametrize("update", some([17, 4, 30]))
@pytest.mark.parametrize(("stack", "task"), some(LIVES.values()), ids=LIVES.keys())
def test_a_run_that_was_cut_off_ends_the_same(tmp_path: Path, stack: Any, task: Any, update: int) -> None:
    def live(folder: Path, *more: Any) -> nn.Module:
        graph, trained, data = CudaGraph(strict=True), task(), batches(14, last=4)
        plugins = [OnADevice(), *stack(), EMA(0.9), graph, Checkpoint(every="3 updates"), JSONL(), *more]
        options: dict[str, Any] = {"seed": 3, "device": "cpu", "log_every": 4, "max_epochs": 6}
        trainer = forge.Trainer(plugins=plugins, run_dir=folder, resume="auto", **options)
        trainer.fit(trained, data, data[:3] if task is Net else None)
        assert graph.replayed > 5
        return trained

    ends_as_if_it_had_not_been_cut(live, tmp_path, update)
