"""spans: lines that make the host wait for the device, with torch's warning raised by hand."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Generator
from typing import Any

import pytest
import torch

import forge
from forge.diagnose.syncs import SYNC
from forge.spans.goodput import TimeAccount
from forge.spans.record import HookTimes
from forge_plugins.spans.syncs import NamedSyncs
from tests.support.tasks import Classifier, make_batches

# -- the sync audit, with torch's warning raised by hand --------------------------------------------------------------


def wait() -> None:
    """Stands in for `.item()` on a CUDA tensor: torch warns from inside the call."""
    warnings.warn(SYNC, stacklevel=1)


class Listening(forge.Plugin):
    """Keeps an audit going during a run on the CPU."""

    def __init__(self, audit: NamedSyncs):
        super().__init__()
        self.audit = audit

    @forge.hookimpl
    def forge_start(self, trainer: forge.Trainer) -> None:
        self.audit.listen()

    @forge.hookimpl
    def forge_end(self) -> None:
        self.audit.stop()


def heard(*plugins: forge.Plugin, task: forge.TaskModule | None = None, val: Any = None) -> list[dict[str, Any]]:
    audit = NamedSyncs()
    trainer = forge.Trainer(plugins=[Listening(audit), *plugins], max_epochs=1, run_dir=False)
    trainer.instrument = HookTimes(TimeAccount()).instrument
    trainer.fit(task or Classifier(), make_batches(4), val)
    return audit.rows(4)


def line_of(thing: Any, text: str) -> int:
    source, first = inspect.getsourcelines(thing)
    return first + next(i for i, line in enumerate(source) if text in line)


class Helper(forge.Plugin):
    """Waits in a method that its hook calls."""

    @forge.hookimpl
    def forge_step_end(self) -> None:
        self._read()

    def _read(self) -> None:
        warnings.warn(SYNC, stacklevel=1)  # as `.item()` would


def test_a_wait_is_put_down_to_the_plugin_the_hook_and_the_line() -> None:
    (found,) = heard(Helper())
    assert found["who"] == "plugin 'helper' in step_end"
    assert found["file"].endswith("test_spans_syncs.py")
    assert found["line"] == line_of(Helper, "as `.item()` would")
    assert found["code"] == "warnings.warn(SYNC, stacklevel=1)  # as `.item()` would"
    assert found["per_update"] == 1.0


def test_a_wait_in_a_wrapper_is_its_own_and_inside_is_not() -> None:
    class Outer(forge.Plugin):
        @forge.hookimpl(wrapper=True)
        def forge_train_step(self) -> Generator[None, Any, Any]:
            wait()
            return (yield)

    rows = heard(Outer(), Helper())
    assert sorted(r["who"] for r in rows) == ["plugin 'helper' in step_end", "plugin 'outer' in train_step"]


def test_a_wait_inside_of_what_an_owner_runs_is_not_the_owners() -> None:
    class Owner(forge.Plugin):
        @forge.hookimpl
        def forge_train_step(self, step: forge.Step) -> bool:
            step.run_window()
            step.finish()
            return True

    class Inner(forge.Plugin):
        @forge.hookimpl
        def forge_inspect_grads(self) -> None:
            wait()

    assert [r["who"] for r in heard(Owner(), Inner())] == ["plugin 'inner' in inspect_grads"]


def test_a_wait_in_the_task_or_its_optimizer_is_put_down_to_them() -> None:
    class Waits(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            wait()
            return super().step(closure)

    class Task(Classifier):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wait()
            return super().forward(x)

        def configure_optimizers(self) -> Any:
            return Waits(self.parameters(), lr=0.1)

        @forge.hookimpl
        def forge_step_end(self) -> None:
            wait()

    assert {r["who"]: r["per_update"] for r in heard(task=Task())} == {
        "the task in forward": 1,
        "the task in optimizer_step": 1,
        "the task in step_end": 1,
    }


def test_what_logs_validations_checkpoints_and_the_end_read_is_their_work() -> None:
    class Reads(forge.Plugin):
        @forge.hookimpl
        def forge_log(self) -> None:
            wait()

        @forge.hookimpl(wrapper=True)
        def forge_forward(self, step: forge.Step) -> Generator[None, Any, Any]:
            if step.stage == "val":
                wait()
            return (yield)

        @forge.hookimpl
        def forge_save(self) -> None:
            wait()

    assert heard(Reads(), val=make_batches(1)) == []


def test_a_wait_that_torch_does_not_warn_of_is_heard_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    before = torch.cuda.synchronize

    class Waits(forge.Plugin):
        @forge.hookimpl
        def forge_step_end(self) -> None:
            torch.cuda.synchronize("cuda")

    (found,) = heard(Waits())
    assert (found["who"], found["per_update"]) == ("plugin 'waits' in step_end", 1)
    assert found["code"] == 'torch.cuda.synchronize("cuda")'
    assert torch.cuda.synchronize is before


def test_listening_leaves_warnings_as_they_were() -> None:
    filters, show = list(warnings.filters), warnings.showwarning
    audit = NamedSyncs()
    audit.listen()
    assert warnings.showwarning != show
    audit.stop()
    assert (warnings.filters, warnings.showwarning) == (filters, show)
