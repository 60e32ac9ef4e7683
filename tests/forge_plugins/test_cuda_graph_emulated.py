"""cuda_graph's own logic without a CUDA device: a graph that runs its update again takes the place of a real one.

Everything but the capture itself is the plugin's: keys and windows, metrics handed over late, rates, updates that must
run uncaptured, graphs that are stale. tests/forge_plugins/test_cuda_graph_cuda.py says the same of real graphs.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import forge
from forge.testing import assert_same
from forge_plugins import AMP, EMA, Accumulate, CudaGraph, Freeze, Monitor
from tests.support.emulated_graphs import Net, OnADevice, Shrink, batches, compare, emulate, run
from tests.support.profiles import covering, some


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


STACKS = {
    "nothing": lambda: [],
    "clip": lambda: [Shrink()],
    "accumulate": lambda: [Accumulate(3), Shrink()],
    "bf16": lambda: [AMP("bf16")],
    "ema": lambda: [EMA(0.9), Shrink()],
    "all": lambda: [AMP("bf16"), Accumulate(2), Shrink(), EMA(0.9)],
}


@pytest.mark.parametrize(("stack", "kind"), covering(STACKS, ["AdamW", "SGD"]))
def test_a_run_with_replays_is_the_run_without(stack: str, kind: str) -> None:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    compare(STACKS[stack], 7, task=lambda: Net(kind, **options))


def test_another_shape_gets_a_graph_when_it_comes_again() -> None:
    graph = compare(lambda: [Shrink()], 0, batches(6, last=3), max_epochs=5)
    assert graph.replayed == 30 - 3 - 1


def test_more_shapes_than_graphs_run_uncaptured(caplog: pytest.LogCaptureFixture) -> None:
    make = torch.Generator().manual_seed(1)
    sizes = [8, 8, 8, 8, 7, 6, 5, 4]
    data = [(torch.randn(n, 6, generator=make), torch.randint(3, (n,), generator=make)) for n in sizes]
    graph, plain = CudaGraph(graphs=2), run([], data, max_epochs=6)[0]
    ours, _ = run([graph], data, max_epochs=6)
    assert_same(ours, plain)
    assert 0 < graph.replayed < 48 - 3
    assert caplog.text.count("windows come in 5 kinds so far") == 1


def test_weights_that_differ_by_window_reach_the_graph() -> None:
    class Weighed(Net):
        def num_items(self, batch: Any) -> int:
            return int((batch[1] != 0).sum())

    compare(lambda: [Accumulate(2)], 10, task=Weighed)


def test_what_is_due_now_and_then_runs_uncaptured() -> None:
    graph = compare(lambda: [Monitor(every="10 updates")], 25)
    assert graph.replayed == 36 - 4 - 3  # monitor acts in the first update, and at 10, 20 and 30; three warm up


def test_a_thaw_is_captured_anew(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="forge"):
        graph = compare(lambda: [Freeze(modules="net.0", thaw={"net.0": "1 epoch"})], 25)
    assert graph.replayed <= 36 - 6
    assert "the set of trained parameters changed; the step will be captured again" in caplog.text


def test_a_metric_that_is_a_plain_number_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Counts(Net):
        def training_step(self, batch: Any) -> Any:
            return {**super().training_step(batch), "answer": 42.0}

    graph = CudaGraph()
    ours, logs = run([graph], task=Counts())
    plain, plain_logs = run([], task=Counts())
    assert graph.replayed == 0
    assert "the metric 'train/answer' is a plain number" in caplog.text
    assert_same(ours, plain)
    assert logs == plain_logs


# -- what would make a replay another update --------------------------------------------------------------------------


def refused(task: Any, *plugins: Any, message: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is replayed, the reason is told, and the run is the run without."""
    graph = CudaGraph()
    ours, logs = run([*plugins, graph], task=task())
    plain, plain_logs = run([*plugins], task=task())
    assert graph.replayed == 0
    assert message in caplog.text
    assert_same(ours, plain)
    assert logs == plain_logs


def test_a_buffer_that_is_replaced_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Replaces(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(()))

        def training_step(self, batch: Any) -> Any:
            out = super().training_step(batch)
            self.average = 0.9 * self.average + 0.1 * out["loss"].detach()
            return {**out, "average": self.average}

    refused(Replaces, message="replaces the buffer 'average'; write into it", caplog=caplog)


@pytest.mark.parametrize(
    ("who", "draw"),
    some([("numpy", np.random.rand), ("random", random.random), ("torch", lambda: float(torch.rand(())))], quick=1),
)
def test_numbers_drawn_on_the_host_are_refused(who: str, draw: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Draws(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.net[3]  # in this emulation dropout draws on the host too

        def training_step(self, batch: Any) -> Any:
            return super().training_step((batch[0] * (1 + 0.1 * draw()), batch[1]))

    refused(Draws, message=f"draws numbers from {who} on the host", caplog=caplog)


def test_a_tasks_own_hook_inside_the_step_must_say_that_it_may(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Net):
        @forge.hookimpl
        def forge_edit_grads(self, step: forge.Step) -> None:
            for parameter in step.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    refused(Own, message="the task's forge_edit_grads acts inside every update", caplog=caplog)

    class May(Own):
        capturable = True

    compare(lambda: [], 30, task=May)


def at(update: int, act: Callable[[Any], None]) -> Any:
    @forge.on("step_end", mutates=True)
    def once(step: forge.Step) -> None:
        if step.index == update:
            act(step)

    return once


def moved_parameter(step: forge.Step) -> None:
    weight = step.trainer.task.net[4].weight
    weight.data = weight.data.clone() * 0.5


def loaded_state(step: forge.Step) -> None:
    optimizer = step.trainer.optimizers[None]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def norm_in_evaluation(step: forge.Step) -> None:
    step.trainer.task.net[1].eval()


@pytest.mark.parametrize("act", some([moved_parameter, loaded_state, norm_in_evaluation], quick=1))
def test_what_a_callback_changes_is_captured_anew(act: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="forge"):
        graph = compare(lambda: [at(15, act)], 25)
    assert graph.replayed == 36 - 3 - 4  # the update that finds it, and three to warm up again
    assert "the step will be captured again" in caplog.text


def test_a_buffer_that_an_evaluation_replaces_is_found() -> None:
    replaced: list[Any] = []  # kept: else a new buffer may get the memory of an old one, which is no change

    class Replaces(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.zeros(()))

        def training_step(self, batch: Any) -> Any:
            return super().training_step((batch[0] + self.shift, batch[1]))

        def validation_step(self, batch: Any) -> Any:
            replaced.append(self.shift)
            self.shift = self.shift + 0.1
            return super().validation_step(batch)

    def trained(*plugins: Any) -> Any:
        task = Replaces()
        trainer = forge.Trainer(
            plugins=[OnADevice(), *plugins], max_epochs=4, seed=3, device="cpu", run_dir=False, log_every=5
        )
        trainer.fit(task, batches(), batches(2))
        return task

    graph = CudaGraph(strict=True)
    assert_same(trained(graph), trained())
    assert 0 < graph.replayed < 48 - 3 - 3 * 3


def test_the_optimizer_is_handed_back_as_it_was() -> None:
    seen: list[Any] = []

    @forge.on("step_end")
    def note(step: forge.Step) -> None:
        seen.append(step.trainer.optimizers[None])

    class Plain(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=2.0**-7)

    run([CudaGraph(strict=True), note], task=Plain())
    group = seen[0].param_groups[0]
    assert (group["fused"], group["capturable"], group["foreach"]) == (None, False, None)
    assert isinstance(group["lr"], float)
