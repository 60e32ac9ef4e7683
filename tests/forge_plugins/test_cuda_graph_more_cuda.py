"""cuda_graph on a CUDA device for several optimizers, updates captured in part, remat, fp16 and many shapes: replayed
updates are the updates, bit for bit."""

from __future__ import annotations

import gc
import logging
import math
from typing import Any

import pytest
import torch

import forge
from forge.errors import NonFiniteError
from forge_plugins import AMP, EMA, Accumulate, Clip, CudaGraph, Guard, Prefetch, Remat, Schedule
from tests.forge_plugins.test_cuda_graph_cuda import batches, compare, run
from tests.forge_plugins.test_cuda_graph_more import GAN, Blocks, Noise, Spikes
from tests.support.emulated_graphs import Net

pytestmark = pytest.mark.gpu


def with_nan(*bad: int) -> list[Any]:
    data = batches()
    for index in bad:
        data[index][0][0, 0] = math.nan
    return data


# -- several optimizers -----------------------------------------------------------------------------------------------


TURNS = {
    "nothing": lambda: [],
    "noise": lambda: [Noise(), Clip(0.1)],
    "guard": lambda: [Guard(), Clip(0.1)],
    "all": lambda: [Noise(), Guard(), AMP("bf16"), Accumulate(2), Clip(0.1), EMA(0.9), Prefetch()],
}


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("stack", TURNS.values(), ids=TURNS.keys())
def test_turns_that_are_replayed_are_the_turns(stack: Any, kind: str) -> None:
    compare(stack, 15, None, lambda: GAN(kind))


@pytest.mark.parametrize(
    ("where", "task"),
    [(2, GAN), (9, GAN), (6, Net), (9, Net)],
    ids=["turns at once", "turns", "soon", "later"],
)
def test_guard_stops_a_captured_run(where: int, task: Any) -> None:
    graph = CudaGraph(strict=True)
    with pytest.raises(NonFiniteError, match=rf"Update {where} .*loss is not finite"):
        run([Guard(), graph], with_nan(where), task(), max_epochs=1)
    assert task is GAN or graph.replayed >= where - 3


@pytest.mark.parametrize(
    ("task", "schedule"),
    [(Net, "cosine"), (GAN, "cosine"), (lambda: Net("SGD", momentum=0.9), "one_cycle")],
    ids=["one optimizer", "turns", "outside"],
)
def test_nothing_waits_for_the_device_between_logs(task: Any, schedule: Any) -> None:
    graph, strict = CudaGraph(strict=True), []
    plugins = [Schedule(schedule), Guard(), Clip(0.1), EMA(0.9), graph]

    @forge.on("step_end")
    def no_waiting(step: forge.Step) -> None:
        if graph.replayed == 1:
            torch.cuda.set_sync_debug_mode("error")
        strict.append(torch.cuda.get_sync_debug_mode())

    try:
        run([*plugins, no_waiting], None, task(), max_epochs=1, log_every=100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert graph.replayed == 17
    assert strict.count(2) >= 16


# -- a part of an update ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_moving_momentum_is_the_momentum(kind: str) -> None:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    stack = lambda: [Guard(), Schedule("one_cycle", warmup=5), Clip(0.1), EMA(0.9)]  # noqa: E731
    compare(stack, 37, task=lambda: Net(kind, **options))


# -- fp16 -------------------------------------------------------------------------------------------------------------


HALVES = {
    "alone": lambda: [AMP("fp16", init_scale=2.0**18)],
    "clip": lambda: [AMP("fp16", init_scale=2.0**20, growth_interval=3), Clip(0.1), EMA(0.9), Guard()],
    "accumulate": lambda: [AMP("fp16", init_scale=2.0**30), Accumulate(2), Clip(0.1), Schedule("one_cycle")],
}


@pytest.mark.parametrize("stack", HALVES.values(), ids=HALVES.keys())
def test_a_loss_scaler_skips_the_same_updates(stack: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="forge"):
        compare(stack, 15, None, Spikes)
    told = [line for line in caplog.messages if "skipped in this run" in line]
    assert len(told) == 2
    assert len(set(told)) == 1


# -- remat ------------------------------------------------------------------------------------------------------------


REMATS = {
    "all": lambda: [Remat()],
    "window": lambda: [Remat(), Clip(0.1), Accumulate(2)],
    "bf16": lambda: [Remat(), AMP("bf16"), Guard()],
    "outside": lambda: [Remat(), Schedule("one_cycle")],
}


@pytest.mark.parametrize("stack", REMATS.values(), ids=REMATS.keys())
def test_blocks_that_are_computed_again_are_captured(stack: Any) -> None:
    compare(stack, 15, None, Blocks)


# -- many shapes, and memory ------------------------------------------------------------------------------------------


STACKS = {
    "one optimizer": (list, Net),
    "turns": (lambda: [Noise()], GAN),
    "outside": (lambda: [Schedule("one_cycle")], Net),
    "fp16": (lambda: [AMP("fp16")], Net),
}


@pytest.mark.parametrize(("plugins", "task"), STACKS.values(), ids=STACKS.keys())
def test_nothing_is_left_on_the_device_after_a_run(plugins: Any, task: Any) -> None:
    def allocated() -> int:
        graph = CudaGraph(strict=True)
        run([*plugins(), graph], None, task())
        assert graph.replayed > 30
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    assert allocated() == allocated()
