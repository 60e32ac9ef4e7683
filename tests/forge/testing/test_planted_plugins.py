"""Bad plugins, one mistake each: the kit finds every one, and says what is wrong and what to do."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge
from forge.testing import check_plugin
from tests.conftest import PROFILE
from tests.support.plugin_kit import PLAINEST


class LeaksHook(forge.Plugin):
    """Looks at activations, and never takes its hook away."""

    observer = True

    @forge.hookimpl
    def forge_start(self, trainer: forge.Trainer) -> None:
        next(trainer.task.children()).register_forward_hook(self.look)

    def look(self, module: nn.Module, args: Any, output: Tensor) -> None: ...


class LeaksParameterHook(forge.Plugin):
    """Looks at gradients as they come, and never takes its hook away."""

    observer = True

    @forge.hookimpl
    def forge_start(self, trainer: forge.Trainer) -> None:
        for parameter in trainer.task.parameters():
            parameter.register_post_accumulate_grad_hook(self.look)

    def look(self, parameter: Tensor) -> None: ...


class MutatesWeights(forge.Plugin):
    """Says that it only watches, and rounds a weight."""

    observer = True

    @forge.hookimpl
    def forge_boundary(self, step: forge.Step) -> None:
        with torch.no_grad():
            step.parameters()[0].copy_(step.parameters()[0].half())


class LosesState(forge.Plugin):
    """Noise that shrinks with every update, and begins anew when a run is resumed."""

    before = ("clip",)

    @forge.hookimpl
    def forge_start(self) -> None:
        self.scale = 1.0

    @forge.hookimpl
    def forge_edit_grads(self, step: forge.Step) -> None:
        self.scale *= 0.5
        for parameter in step.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=self.scale)


class DependsOnOrder(forge.Plugin):
    """Doubles gradients: before they are clipped, or after?"""

    @forge.hookimpl
    def forge_edit_grads(self, step: forge.Step) -> None:
        for parameter in step.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)


class Swallows(forge.Plugin):
    """Means well: a bad batch shall not end the run."""

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self) -> Generator[None, Any, Any]:
        try:
            return (yield)
        except Exception:
            return True


class StaysPatched(forge.Plugin):
    """Puts grad mode back, unless something fails meanwhile."""

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self) -> Generator[None, Any, Any]:
        torch.set_default_dtype(torch.float64)
        result = yield
        torch.set_default_dtype(torch.float32)
        return result


class Syncs(forge.Plugin):
    """Says that it may run in a CUDA graph, and decides by a number."""

    capturable = True
    before = ("clip",)

    @forge.hookimpl
    def forge_edit_grads(self, step: forge.Step) -> None:
        for parameter in step.parameters():
            if parameter.grad is not None and parameter.grad.norm().item() > 1:
                parameter.grad.div_(2)


class LeavesAFlag(forge.Plugin):
    """Makes a run deterministic, and all that follow it too."""

    @forge.hookimpl
    def forge_start(self) -> None:
        torch.use_deterministic_algorithms(True)


class LeavesTheEnvironment(forge.Plugin):
    """Tells a library something through the environment."""

    @forge.hookimpl
    def forge_start(self) -> None:
        os.environ["A_LIBRARY_IS_QUIET"] = "1"


class CarriesState(forge.Plugin):
    """Counts over all runs of an object, and acts by it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @forge.hookimpl
    def forge_inspect_grads(self, step: forge.Step) -> None:
        self.count += 1
        if self.count == 9:
            step.skip_update("the ninth")


class LeavesEvalMode(forge.Plugin):
    """Says that it only watches, and looks at the task as it is when nothing is dropped."""

    observer = True

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        step.trainer.task.eval()


class KeepsGraph(forge.Plugin):
    """A running mean of the loss, with everything that led to it."""

    observer = True

    @forge.hookimpl
    def forge_start(self) -> None:
        self.mean: Tensor | float = 0.0

    @forge.hookimpl(wrapper=True)
    def forge_backward(self, loss: Tensor) -> Generator[None, Any, Any]:
        self.mean = 0.9 * self.mean + 0.1 * loss
        return (yield)


class GoesByTheClock(forge.Plugin):
    """Shrinks gradients by the time of day."""

    before = ("clip",)

    @forge.hookimpl
    def forge_edit_grads(self, step: forge.Step) -> None:
        for parameter in step.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(time.perf_counter() % 1)


class LeavesAThread(forge.Plugin):
    """Watches in the background, and is never told to stop."""

    stop = threading.Event()

    @forge.hookimpl
    def forge_start(self) -> None:
        threading.Thread(target=self.stop.wait, name="watcher", daemon=True).start()


class LeavesAFile(forge.Plugin):
    """Writes a log, and leaves its file open."""

    files: list[Any] = []

    @forge.hookimpl
    def forge_start(self, trainer: forge.Trainer) -> None:
        if trainer.run_dir is not None and trainer.env.is_main:
            trainer.run_dir.mkdir(parents=True, exist_ok=True)
            self.files.append((trainer.run_dir / "own.log").open("w"))


class WritesEverywhere(forge.Plugin):
    """Writes a log into the run folder, on all ranks at once."""

    @forge.hookimpl
    def forge_log(self, trainer: forge.Trainer, update: int) -> None:
        if trainer.run_dir is not None:
            trainer.run_dir.mkdir(parents=True, exist_ok=True)
            (trainer.run_dir / "own.log").write_text(str(update))


class CountsAnew(forge.Plugin):
    """Says how many updates it has seen, and begins anew when a run is resumed."""

    observer = True

    @forge.hookimpl
    def forge_start(self) -> None:
        self.seen = 0

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        self.seen += 1
        step.record("counts_anew/seen", self.seen)


class OddState(forge.Plugin):
    """Has a lock in its state, which no file can hold."""

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"queue": {"lock": threading.Lock()}}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None: ...


PLANTED: dict[type[forge.Plugin], list[str]] = {
    LeaksHook: ["'leaks_hook' leaves a hook on net after a fit", "LeaksHook.look", "handle.remove()"],
    LeaksParameterHook: ["'leaks_parameter_hook' leaves a hook on the parameter net.0.weight", "handle.remove()"],
    MutatesWeights: ["'mutates_weights' declares observer = True", "in the weights (net.0.weight)"],
    LosesState: ["'loses_state' that is resumed at update 4 ends differently", "forge_state_dict"],
    DependsOnOrder: ["'depends_on_order' depends on its place", "'clip'", "forge_edit_grads", "before = ('clip',)"],
    Swallows: ["'swallows' swallows an error in the task's training_step", "finally"],
    StaysPatched: [
        "'stays_patched' leaves torch.get_default_dtype() changed after an error in the task's validation_step"
    ],
    Syncs: [
        "'syncs' declares capturable = True",
        "forge_edit_grads",
        ".item()",
        "test_planted_plugins.py:",
        "step.record",
    ],
    LeavesAFlag: [
        "'leaves_a_flag' leaves torch.are_deterministic_algorithms_enabled() changed",
        "True instead of False",
    ],
    LeavesTheEnvironment: ["leaves os.environ changed after a fit: A_LIBRARY_IS_QUIET is '1' instead of None"],
    CarriesState: ["'carries_state' carries state from one run into the next", "forge_start, not in __init__"],
    LeavesEvalMode: [
        "'leaves_eval_mode' declares observer = True",
        "in the modes of modules (the task, ",
        "'eval' instead of 'train'. Save `training` of",
    ],
    KeepsGraph: ["'keeps_graph' keeps", "alive with their autograd graph", "memory grows", "detach()"],
    GoesByTheClock: ["'goes_by_the_clock' makes a fit end differently each time", "the time", "trainer.seed"],
    LeavesAThread: ["'leaves_a_thread' leaves a thread running after a fit: watcher", "join it, in forge_end"],
    LeavesAFile: ["'leaves_a_file' leaves a file open after a fit", "own.log", "forge_end"],
    WritesEverywhere: ["'writes_everywhere' writes run/own.log on rank 1", "trainer.env.is_main"],
    CountsAnew: [
        "'counts_anew' that is resumed at update 4 has other metrics or another state",
        "at update 5, in the metrics (counts_anew/seen): ",
        "forge_state_dict",
    ],
    OddState: ["odd_state.queue.lock is a _thread.lock, which a checkpoint cannot hold", "Make it a tensor"],
}
"""Each mistake with words that its message must have: who, where, what, and the way out."""


PASSED: dict[Any, list[str]] = {
    DependsOnOrder: ["leaks", "runs", "files", "graphs", "exceptions"],
    Syncs: ["leaks", "runs", "files", "graphs", "exceptions"],
    StaysPatched: ["leaks", "runs", "files", "graphs"],
    Swallows: ["leaks", "runs", "files", "graphs"],
    KeepsGraph: ["leaks", "runs", "files"],
}
"""Checks that come before the one that finds it, and are left to the full profile."""


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_a_planted_mistake_is_found_and_named(kind: type[forge.Plugin]) -> None:
    earlier = PASSED.get(kind, []) if PROFILE == "quick" else []
    with pytest.raises(AssertionError) as found:
        check_plugin(kind, leave_out=[*PLAINEST, *earlier])
    missing = [words for words in PLANTED[kind] if words not in str(found.value)]
    assert not missing, f"{missing} not in: {found.value}"


def test_a_switch_that_a_plugin_leaves_is_put_back_by_the_kit() -> None:
    with pytest.raises(AssertionError, match="leaves torch"):
        check_plugin(LeavesAFlag)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(AssertionError, match="leaves os"):
        check_plugin(LeavesTheEnvironment)
    assert "A_LIBRARY_IS_QUIET" not in os.environ


def teardown_module() -> None:
    LeavesAThread.stop.set()
    for file in LeavesAFile.files:
        file.close()
