"""What does a plugin do when something else fails? The first error leaves the fit as it is, and all is put back."""

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
from forge.testing.weights import first_difference

ALWAYS = ("forge_setup_env", "forge_step_end", "forge_log")
"""Where another plugin fails: before anything has started, in an update, around it; and in all that this one wraps."""
STEPS = ("training_step", "validation_step")
SHORT = 6
"""Updates of a fit: a whole epoch with its validation, and one more."""


class PlantedError(Exception):
    """What the kit raises to see who lets it pass."""


def check_exceptions(subject: Subject) -> None:
    """Fail in the task and in another plugin, here and there; after each time the same object must serve a next fit."""
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
    with flags_kept(subject, what), _heard() as said:
        left = _run(subject, plugin, task, failing)
    planted: PlantedError | None = getattr(failing or task, "error", None)
    if planted is None:
        return  # the place was never reached
    assert left is not None, (
        f"{subject.name!r} swallows {what}: the fit went on as if nothing had happened. A wrapper lets errors pass: "
        "write `try: return (yield)`, with `finally:` for what must be put back."
    )
    assert left is planted, (
        f"{subject.name!r} replaces {what} by {type(left).__name__}: {left}. Let the first error pass as it is: nobody "
        "finds its cause otherwise."
    )
    own = [text for name, text in said if name == subject.name]
    assert not own, (
        f"{subject.name!r} fails once more after {what}: {own[0]}. forge_exception and forge_end are called whatever "
        "happened, also where forge_start never ran: set in __init__ what they use."
    )
    check_task(subject, task, what)
    with subject.surviving(f"a fit with the object that saw {what}"):
        again, _ = subject.fit(plugin, max_updates=SHORT)
    difference = first_difference(again, expected)
    assert difference is None, (
        f"{subject.name!r} carries something of a run that failed, by {what}, into the next: {difference} "
        "Begin anew in forge_start."
    )


def _run(subject: Subject, plugin: Plugin, task: TaskModule, failing: Plugin | None) -> BaseException | None:
    """The error that leaves a fit in which something fails; who fails stands innermost, so that all wrappers see it."""
    try:
        subject.fit(plugin, *([] if failing is None else [failing]), task=task, max_updates=SHORT)
    except Exception as error:
        return error
    return None


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
    """Fails in one hook, at its second call where there are several."""

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
def _heard() -> Iterator[list[tuple[str, str]]]:
    """(plugin, what it said) of those that fail while others are told of an error: forge logs it, and goes on."""
    said: list[tuple[str, str]] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "failed in" in str(record.msg) and isinstance(record.args, tuple) and len(record.args) == 4:
                name, hook, kind, text = record.args
                said.append((str(name), f"{hook} raises {kind}: {text}"))

    handler, logger = Listen(), logging.getLogger("forge")
    level = logger.level
    logger.addHandler(handler)
    if not logger.isEnabledFor(logging.ERROR):
        logger.setLevel(logging.ERROR)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
