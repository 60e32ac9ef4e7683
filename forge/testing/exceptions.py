"""Check of failures elsewhere: the first error must leave the fit unchanged, and everything must be restored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.stack import ONE_BY_ONE, SPECS
from forge.contract.task import TaskModule
from forge.testing.leaks import check_task
from forge.testing.process_flags import flags_kept
from forge.testing.subject import Subject, wraps
from forge.testing.tiny import Batch, TinyTask
from forge.twin.compare import first_difference

ALWAYS = ("forge_setup_env", "forge_step_end", "forge_log")
"""Hooks in which another plugin fails: before the start, in an update and around it; hooks that are wrapped too."""
STEPS = ("training_step", "validation_step")
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
        _check_place(subject, f"the task's {step}", FailingTask(step), None, expected)
    for hook in dict.fromkeys((*ALWAYS, *wrapped)):
        _check_place(subject, f"another plugin's {hook}", TinyTask(), FailingPlugin(hook), expected)


def _check_place(subject: Subject, place: str, task: TaskModule, failing: Plugin | None, expected: TaskModule) -> None:
    what, plugin = f"an error in {place}", subject.make()
    raised: BaseException | None = None
    with flags_kept(subject, what), _logged_failures() as failures:
        try:  # the failing plugin is innermost, so that all wrappers see its error
            subject.fit(plugin, *([] if failing is None else [failing]), task=task, max_updates=SHORT)
        except Exception as error:
            raised = error
    planted: PlantedError | None = getattr(failing or task, "error", None)
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


class FailingTask(TinyTask):
    """Fails in the fourth batch of a stage."""

    def __init__(self, step: str):
        super().__init__()
        self.failing_step, self.left = step, 4
        self.error: PlantedError | None = None

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        output = super().training_step(batch)
        self._fail("training_step")
        return output

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        output = super().training_step(batch)
        self._fail("validation_step")
        return output

    def _fail(self, step: str) -> None:
        self.left -= step == self.failing_step
        if not self.left:
            self.error = PlantedError(f"raised in {step} by forge.testing")
            raise self.error


class FailingPlugin(Plugin):
    """Fails in one hook, at its second call if it has several."""

    def __init__(self, hook: str):
        super().__init__()
        self.name = "forge.testing.failing"
        self.error: PlantedError | None = None
        setattr(self, hook, _failing(self, hook))


def _failing(plugin: FailingPlugin, hook: str) -> Callable[..., Any]:
    left = 1 if hook in ("forge_setup_env", "forge_build_optimizers", "forge_start", "forge_export") else 2

    @hookimpl(wrapper=True)
    def fail() -> Generator[None, Any, Any]:
        nonlocal left
        left -= 1
        if not left:
            plugin.error = PlantedError(f"raised in {hook} by forge.testing")
            raise plugin.error
        return (yield)

    return fail


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
    level = logger.level
    logger.addHandler(handler)
    if not logger.isEnabledFor(logging.ERROR):
        logger.setLevel(logging.ERROR)
    try:
        yield failures
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
