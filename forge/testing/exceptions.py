"""Check of failures elsewhere: the first error must leave the fit unchanged, and everything must be restored."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.stack import ONE_BY_ONE, SPECS
from forge.contract.task import TaskModule
from forge.testing.leaks import check_task
from forge.testing.process_flags import flags_kept
from forge.testing.subject import Subject, wraps
from forge.testing.tiny import TinyTask
from forge.twin.compare import first_difference

ALWAYS = ("forge_setup_env", "forge_step_end", "forge_log")
"""Hooks in which another plugin fails: before the start, in an update and around it; hooks that are wrapped too."""
CALLED_ONCE = ("forge_setup_env", "forge_build_optimizers", "forge_start", "forge_export")
STEPS = ("training_step", "validation_step")
FOURTH = 4
"""The batch in which a step fails."""
SHORT = 6
"""Updates of a fit: a whole epoch with its validation, and one update more."""


class PlantedError(Exception):
    """An error that the kit raises on purpose."""


def check_exceptions(subject: Subject) -> None:
    """Fail in several places of the task and of another plugin; the same object must then serve another fit."""
    if subject.situation.task is not TinyTask:
        return
    expected, _ = subject.fit(subject.make(), max_updates=SHORT)
    plugin = subject.make()
    wrapped = [hook for hook in SPECS if wraps(plugin, hook) and hook not in ONE_BY_ONE]
    for step in STEPS:
        fail = PlantedFailure(f"the task's {step}", FOURTH)
        _check_place(subject, fail, failing_task(step, fail), [], expected)
    for hook in dict.fromkeys((*ALWAYS, *wrapped)):
        fail = PlantedFailure(f"another plugin's {hook}", 1 if hook in CALLED_ONCE else 2)
        _check_place(subject, fail, TinyTask(), [FailingPlugin(hook, fail)], expected)


def _check_place(
    subject: Subject, fail: PlantedFailure, task: TaskModule, failing: Sequence[Plugin], expected: TaskModule
) -> None:
    what, plugin = f"an error in {fail.place}", subject.make()
    raised: BaseException | None = None
    with flags_kept(subject, what), _logged_failures() as failures:
        try:  # the failing plugin is innermost, so that all wrappers see its error
            subject.fit(plugin, *failing, task=task, max_updates=SHORT)
        except Exception as error:
            raised = error
    planted = fail.error
    if planted is None:
        return  # the place was never reached
    assert raised is not None, (
        f"{subject.name!r} swallows {what}: the fit continued. A wrapper must let errors pass: "
        "write `try: return (yield)`, and restore state in `finally:`."
    )
    assert raised is planted, (
        f"{subject.name!r} replaces {what} by {type(raised).__name__}: {raised}. Let the first error pass unchanged, "
        "so that its cause can be found."
    )
    own = [text for name, text in failures if name == subject.name]
    assert not own, (
        f"{subject.name!r} fails once more after {what}: {own[0]}. forge_exception and forge_end are always called, "
        "even if forge_start never ran: set the attributes that they use in __init__."
    )
    check_task(subject, task, what)
    with subject.surviving(f"a fit with the object that saw {what}"):
        again, _ = subject.fit(plugin, max_updates=SHORT)
    difference = first_difference(again, expected)
    assert difference is None, (
        f"{subject.name!r} carries state of a run that failed, by {what}, into the next: {difference}. "
        "Reset it in forge_start."
    )


class PlantedFailure:
    """Raises at its n-th call."""

    def __init__(self, place: str, call: int):
        self.place, self.left = place, call
        self.error: PlantedError | None = None

    def __call__(self) -> None:
        self.left -= 1
        if not self.left:
            self.error = PlantedError(f"raised in {self.place} by forge.testing")
            raise self.error


def failing_task(step: str, fail: PlantedFailure) -> TaskModule:
    """Return a task that fails at the end of a step."""
    task = TinyTask()
    compute = getattr(task, step)

    def fails(batch: Any) -> Any:
        output = compute(batch)
        fail()
        return output

    setattr(task, step, fails)
    return task


class FailingPlugin(Plugin):
    """Fails in one hook."""

    def __init__(self, hook: str, fail: PlantedFailure):
        super().__init__()
        self.name = "forge.testing.failing"

        @hookimpl(wrapper=True)
        def fails() -> Generator[None, Any, Any]:
            fail()
            return (yield)

        setattr(self, hook, fails)


@contextmanager
def _logged_failures() -> Iterator[list[tuple[str, str]]]:
    """Collect (plugin, error) of plugins that fail while an error is handled: forge logs these and continues."""
    failures: list[tuple[str, str]] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "failed in" in str(record.msg) and isinstance(record.args, tuple) and len(record.args) == 4:
                name, hook, kind, text = record.args
                failures.append((str(name), f"{hook} raises {kind}: {text}"))

    handler, logger = Listen(), logging.getLogger("forge")
    logger.addHandler(handler)
    try:
        yield failures
    finally:
        logger.removeHandler(handler)
