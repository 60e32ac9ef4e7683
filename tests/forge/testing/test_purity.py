"""The law of purity: under any observers a user's code sees what the bare loop shows."""

from __future__ import annotations

import copy
import os
import random
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parameter import UninitializedParameter

import forge
from forge import registry
from forge.contract.plugin import EFFECTS
from forge.snapshot.copies import without_hooks
from forge.testing.process_flags import SHARED, changed_flags, read_flags
from forge.testing.purity import (
    BATCH,
    UPDATES,
    Sightings,
    SpyingData,
    SpyingTask,
    check_purity,
    difference,
    view,
)
from forge.testing.subject import subject
from forge.twin.record import Record
from tests.conftest import PROFILE
from tests.support.plugin_kit import ACTING, PACKAGES


@cache
def observers() -> list[str]:
    """The installed ones, built in or not; those of other packages in the full profile, where each starts a service."""
    names = [name for name in registry.installed("plugin") if PROFILE == "full" or name not in PACKAGES]
    return [name for name in names if registry.load("plugin", name).observer]


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_TRACKING_URI", (tmp_path_factory.mktemp("mlflow") / "store").as_uri())
        yield


@contextmanager
def process_restored() -> Iterator[None]:
    before = read_flags()
    try:
        yield
    finally:
        for name, _ in changed_flags(before):
            SHARED[name][1](before[name])


def made(name: str) -> forge.Plugin:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    return registry.load("plugin", name)(**ACTING.get(name, {}))


def noticed(*names: str, bare: Record | None = None) -> str:
    stack = [made(name) for name in names]
    return difference(bare or view([]), view(stack), {effect for plugin in stack for effect in plugin.effects})


@pytest.fixture(scope="module")
def bare() -> Record:
    """What a run without plugins shows, once all that observers import has been imported."""
    view([made(name) for name in observers()])
    return view([])


def test_no_observer_is_noticed(bare: Record) -> None:
    assert len(observers()) >= 12
    assert {name: found for name in observers() if (found := noticed(name, bare=bare))} == {}


def test_observers_are_not_noticed_together(bare: Record) -> None:
    """Those that declare files at most: other effects would hide what the rest of them does."""
    quiet = [name for name in observers() if {*registry.load("plugin", name).effects} <= {"files"}]
    assert len(quiet) >= 10
    assert noticed(*quiet, bare=bare) == ""


def test_the_run_without_plugins_shows_what_a_plain_loop_shows(bare: Record) -> None:
    task = SpyingTask()
    data, optimizer = SpyingData(Sightings(), "sample", 0), task.configure_optimizers()
    read = [int(mark.value.removeprefix("sample ")) for mark in bare.marks if mark.path == "sample"]
    forge.seed(0)
    for update in range(UPDATES):
        rows = [data[index] for index in read[update * BATCH : (update + 1) * BATCH]]
        optimizer.zero_grad()
        task.training_step([torch.stack(column) for column in zip(*rows, strict=True)])["loss"].backward()
        optimizer.step()
    kinds = ("call", "hook", "numbers")
    assert task.seen.record.marks == [mark for mark in bare.marks if mark.path in kinds]


# -- what breaks the law is found, by name ----------------------------------------------------------------------------


def at_boundary(act: Callable[[forge.Run], Any], *declared: str) -> Callable[[], forge.Plugin]:
    """A plugin that claims to watch, and acts after the third update."""

    class Watcher(forge.Plugin):
        """Acts."""

        observer = True
        effects = declared

        @forge.hookimpl
        def forge_boundary(self, trainer: forge.Run) -> None:
            if trainer.progress.update == 3:
                act(trainer)

    return Watcher


def runs_a_copy(run: forge.Run, copied: Callable[[nn.Module], nn.Module]) -> None:
    state = torch.get_rng_state()
    copied(run.task).net(torch.randn(4, 6)).sum().backward()  # pyright: ignore[reportCallIssue]
    torch.set_rng_state(state)


def reads(run: forge.Run) -> None:
    run.given_loaders["train"].dataset[0]


def saves(run: forge.Run) -> None:
    run.task.state_dict()


def evaluates(run: forge.Run) -> None:
    run.hooks.forge_evaluate(run, "val")


def writes(run: forge.Run) -> None:
    assert run.run_dir is not None
    (run.run_dir / "own.txt").touch()


IMPURE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a forward": (lambda run: run.task(torch.zeros(4, 6)), "forward_pre_hook of the task"),
    "a backward": (lambda run: run.task.net[4].weight.sum().backward(), "a tensor hook of net.4.weight"),  # pyright: ignore
    "a copy with hooks": (lambda run: runs_a_copy(run, copy.deepcopy), "a forward_pre_hook of net"),
    "an optimizer's state": (lambda run: run.optimizers[None].state_dict(), "state_dict_pre_hook of the optimizer"),
    "global numbers": (lambda run: random.random(), "Draw from a generator of your own"),
    "the task's numbers": (lambda run: run.task.own_python.random(), "from the task's own"),
    "a file": (lambda run: Path("own.txt").touch(), "(own.txt): only the first has it"),
    "a changed file": (lambda run: Path("notes.txt").write_text("mine"), "(notes.txt): b'mine' instead of"),
    "a variable": (lambda run: os.environ.update(SEEN="1"), "os.environ is"),
    "a filter": (lambda run: warnings.simplefilter("ignore", BytesWarning), "warnings.filters is"),
    "a signal": (lambda run: signal.signal(signal.SIGUSR1, signal.SIG_IGN), "the handler of SIGUSR1 is"),
    "a hook on all modules": (lambda run: register_module_forward_hook(print_nothing), "_global_forward_hooks"),
}


def print_nothing(*args: Any) -> None: ...


@pytest.mark.parametrize("case", IMPURE)
def test_an_observer_that_is_noticed_is_refused(case: str) -> None:
    act, message = IMPURE[case]
    with process_restored(), pytest.raises(AssertionError, match=f"the user's code notices it: .*{re.escape(message)}"):
        check_purity(subject(at_boundary(act), tuple, ()))


@pytest.mark.parametrize(
    ("effect", "act"), [("files", writes), ("state_dict", saves), ("evaluates", evaluates), ("reads_ahead", reads)]
)
def test_what_an_observer_declares_as_its_work_is_excepted(effect: str, act: Callable[[forge.Run], Any]) -> None:
    with pytest.raises(AssertionError, match=re.escape(f"declare it: effects = ({effect!r},)")):
        check_purity(subject(at_boundary(act), tuple, ()))
    check_purity(subject(at_boundary(act, effect), tuple, ()))
    others = EFFECTS.keys() - {effect}
    with pytest.raises(AssertionError, match="notices it"):
        check_purity(subject(at_boundary(act, *others), tuple, ()))


def test_a_copy_without_hooks_may_run() -> None:
    check_purity(subject(at_boundary(lambda run: runs_a_copy(run, without_hooks)), tuple, ()))


def test_a_copy_keeps_the_hooks_that_make_layers_work() -> None:
    layer = nn.LazyLinear(2)  # a hook of torch's gives it its size
    layer.register_forward_hook(lambda *_: pytest.fail("the hook of the original was called"))
    assert without_hooks(layer)(torch.ones(1, 3)).shape == (1, 2)
    assert isinstance(layer.weight, UninitializedParameter)


def test_an_unknown_effect_is_refused_by_name() -> None:
    with pytest.raises(forge.StackError, match=r"declares the effect 'file'.*Did you mean 'files'"):
        view([at_boundary(writes, "file")()])
