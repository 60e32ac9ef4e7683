"""The fixtures that forge brings to pytest: small runs, tasks and traces, and nothing for those who do not ask."""

from __future__ import annotations

from pathlib import Path

import pytest

import forge
from forge.testing import EventTrace, assert_same, fit_tiny
from forge_plugins import Checkpoint, Clip, Spans

pytest_plugins = ["pytester"]


@forge.on("step_end", every="2 updates")
def norm(step: forge.Step) -> None:
    """The norm of the first parameter."""
    step.record("norm", step.parameters()[0].norm())


# -- forge_run --------------------------------------------------------------------------------------------------------


def test_a_run_tells_its_task_result_metrics_trace_and_folder(forge_run) -> None:
    run = forge_run([norm], max_updates=4)
    assert run.result.updates == 4
    assert run.series("norm") == [(2, run.metrics[2]["norm"]), (4, run.metrics[4]["norm"])]
    assert sorted(run.metrics) == [1, 2, 3, 4]
    assert run.series("norm")[-1][1] == pytest.approx(next(run.task.parameters()).norm().item())
    assert run.trace.updates("forge_step_end", plugin="norm") == [1, 2, 3, 4]
    assert (run.run_dir / "card.json").exists()


def test_every_run_has_a_folder_of_its_own_and_can_go_on_in_it(forge_run) -> None:
    first, second = forge_run([Checkpoint()], max_updates=3), forge_run([Checkpoint()], max_updates=3)
    assert first.run_dir != second.run_dir
    again = forge_run([Checkpoint()], max_updates=6, run_dir=first.run_dir, resume="auto")
    assert sorted(again.metrics) == [4, 5, 6]
    assert_same(again.task, forge_run(max_updates=6).task)


# -- event_trace ------------------------------------------------------------------------------------------------------


def test_a_trace_has_every_call_in_order_by_plugin(event_trace) -> None:
    fit_tiny([Clip(0.1), norm, event_trace], max_updates=2)
    once = ["forge_train_step", "forge_prepare_batch", "forge_micro_step", "forge_forward", "forge_backward"]
    once += ["forge_edit_grads", "forge_optimizer_step", "forge_step_end"]
    inside = [hook for hook in event_trace.hooks if hook in once]
    assert inside[: len(once)] == once
    assert event_trace.count("forge_edit_grads", plugin="clip") == 2
    assert event_trace.count("forge_backward", plugin="core") == 2


def test_a_trace_changes_nothing(event_trace) -> None:
    assert_same(fit_tiny([Clip(0.1), event_trace])[0], fit_tiny([Clip(0.1)])[0])


def test_a_trace_sees_hooks_that_are_called_plugin_by_plugin(event_trace) -> None:
    class Closing(forge.Plugin):
        @forge.hookimpl
        def forge_exception(self, error: BaseException) -> None: ...

        @forge.hookimpl
        def forge_edit_grads(self) -> None:
            raise ZeroDivisionError

        @forge.hookimpl
        def forge_end(self) -> None: ...

    with pytest.raises(ZeroDivisionError):
        fit_tiny([Closing(), event_trace])
    event_trace.assert_order("forge_edit_grads", "forge_exception", "forge_end")
    assert event_trace.count("forge_optimizer_step") == 0


def test_a_trace_says_what_was_called_instead(event_trace) -> None:
    fit_tiny([Clip(0.1), event_trace], max_updates=1)
    with pytest.raises(AssertionError, match="forge_edit_grads was not called after forge_optimizer_step; called were"):
        event_trace.assert_order("forge_optimizer_step", "forge_edit_grads")
    with pytest.raises(AssertionError, match="forge_save was not called at all"):
        event_trace.assert_order("forge_save")
    with pytest.raises(AssertionError, match="'forge_edit_gradients' is no hook"):
        event_trace.count("forge_edit_gradients")


def test_a_trace_stands_beside_who_times_hooks_too() -> None:
    trace = EventTrace()
    task, _ = fit_tiny([Spans(), trace], max_updates=3)
    assert trace.count("forge_boundary", plugin="spans") == 3
    assert_same(task, fit_tiny(max_updates=3)[0])


# -- the plugin in pytest ---------------------------------------------------------------------------------------------


ALONE = """
import sys

def test_torch_is_not_imported_where_nobody_asks():
    assert "forge.testing.pytest_plugin" in sys.modules
    assert "torch" not in sys.modules
"""
USING = """
def test_the_fixtures_are_there(forge_run, tiny_task, event_trace):
    run = forge_run([event_trace], task=tiny_task(), max_updates=1)
    assert run.trace is event_trace
    assert event_trace.count("forge_backward") == 1
"""


@pytest.mark.slow
def test_other_projects_get_the_fixtures_and_pay_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_alone=ALONE, test_using=USING)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist", "test_alone.py").assert_outcomes(passed=1)
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", "test_using.py").assert_outcomes(passed=1)


def test_loading_it_takes_only_pytest_and_the_standard_library() -> None:
    import forge.testing.pytest_plugin as module

    text = Path(str(module.__file__)).read_text()
    imported = {line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import", "from"))}
    assert imported == {"__future__", "collections", "typing", "pytest"}
