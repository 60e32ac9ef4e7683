"""ledger: the sync audit, with torch's warning raised by hand."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Generator
from typing import Any

import pytest
import torch

import forge
from forge.diagnose.syncs import SYNC
from forge_plugins.ledger.audit import Audit
from tests.support.tasks import Classifier, make_batches

# -- the sync audit, with torch's warning raised by hand --------------------------------------------------------------


def wait() -> None:
    """Stands in for `.item()` on a CUDA tensor: torch warns from inside the call."""
    warnings.warn(SYNC, stacklevel=1)


class Listening(forge.Plugin):
    """Keeps an audit going during a run on the CPU."""

    def __init__(self, audit: Audit):
        super().__init__()
        self.audit = audit

    @forge.hookimpl
    def forge_start(self, trainer: forge.Trainer) -> None:
        self.audit.listen()

    @forge.hookimpl
    def forge_end(self) -> None:
        self.audit.stop()


def heard(*plugins: forge.Plugin, task: forge.TaskModule | None = None, val: Any = None) -> list[dict[str, Any]]:
    audit = Audit()
    trainer = forge.Trainer(plugins=[Listening(audit), *plugins], max_epochs=1, run_dir=False)
    trainer.instrument = lambda hook, impl: (audit.know(hook, impl), impl.function)[1]
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
    assert found["who"] == "plugin 'helper' in forge_step_end"
    assert found["file"].endswith("test_ledger_syncs.py")
    assert found["line"] == line_of(Helper, "as `.item()` would")
    assert found["code"] == "warnings.warn(SYNC, stacklevel=1)  # as `.item()` would"
    assert (found["count"], found["per_update"], found["expected"]) == (4, 1.0, "")


def test_a_wait_in_a_wrapper_is_its_own_and_inside_is_not() -> None:
    class Outer(forge.Plugin):
        @forge.hookimpl(wrapper=True)
        def forge_train_step(self) -> Generator[None, Any, Any]:
            wait()
            return (yield)

    rows = heard(Outer(), Helper())
    assert sorted(r["who"] for r in rows) == ["plugin 'helper' in forge_step_end", "plugin 'outer' in forge_train_step"]


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

    assert [r["who"] for r in heard(Owner(), Inner())] == ["plugin 'inner' in forge_inspect_grads"]


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

    assert {r["who"]: r["count"] for r in heard(task=Task())} == {
        "the task's training_step": 4,
        "the optimizer Waits": 4,
        "the task in forge_step_end": 4,
    }


def test_reads_of_logs_and_validations_are_expected() -> None:
    class Reads(forge.Plugin):
        @forge.hookimpl
        def forge_log(self) -> None:
            wait()

        @forge.hookimpl(wrapper=True)
        def forge_forward(self, step: forge.Step) -> Generator[None, Any, Any]:
            if step.stage == "val":
                wait()
            return (yield)

    rows = heard(Reads(), val=make_batches(1))
    assert {r["expected"] for r in rows} == {"logging", "validating"}


def test_reads_of_checkpoints_and_of_the_end_are_expected() -> None:
    class Reads(forge.Plugin):
        @forge.hookimpl
        def forge_save(self) -> None:
            wait()

        @forge.hookimpl
        def forge_state_dict(self) -> dict[str, Any]:
            wait()
            return {}

        @forge.hookimpl
        def forge_load_state_dict(self, state: dict[str, Any]) -> None: ...

        @forge.hookimpl
        def forge_end(self) -> None:
            wait()

    assert {r["expected"] for r in heard(Reads())} == {"saving", "ending"}


def test_a_wait_that_torch_does_not_warn_of_is_heard_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    before = torch.cuda.synchronize

    class Waits(forge.Plugin):
        @forge.hookimpl
        def forge_step_end(self) -> None:
            torch.cuda.synchronize("cuda")

    (found,) = heard(Waits())
    assert (found["who"], found["count"]) == ("plugin 'waits' in forge_step_end", 4)
    assert found["code"] == 'torch.cuda.synchronize("cuda")'
    assert torch.cuda.synchronize is before


def test_listening_leaves_warnings_as_they_were() -> None:
    filters, show = list(warnings.filters), warnings.showwarning
    audit = Audit()
    audit.listen()
    assert warnings.showwarning != show
    audit.stop()
    assert (warnings.filters, warnings.showwarning) == (filters, show)
