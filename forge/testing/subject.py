"""Subject: the plugin under test, how to make it, and the fits that it is tested in."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.engine.trainer import FitResult
from forge.testing.tiny import TinyGAN, TinyTask, fit_tiny

Make = Callable[[], Plugin]
Given = Plugin | Make
"""The argument of check_plugin: a class, a function that makes the plugin, or a plugin, which is copied."""
UPDATES = 7
"""Updates of a fit: into the second epoch, with and without accumulation."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A kind of fit that plugins must support."""

    name: str
    task: Callable[[], TaskModule]
    window: int = 1


SITUATIONS = (
    Situation("a fit", TinyTask),
    Situation("a fit with accumulation", TinyTask, window=2),
    Situation("a fit with two optimizers", TinyGAN),
    Situation("a fit with two optimizers and accumulation", TinyGAN, window=2),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A plugin that can be made many times, the plugins it requires, and the situations to test."""

    name: str
    make: Make
    beside: Callable[[], Iterable[Plugin]]
    situations: tuple[Situation, ...]

    @property
    def situation(self) -> Situation:
        """Return the simplest situation."""
        return self.situations[0]

    def fit(self, *plugins: Plugin, situation: Situation | None = None, **given: Any) -> tuple[TaskModule, FitResult]:
        """Fit with these plugins and those that the subject requires; `given` are `folder` and Trainer options."""
        return fit([*plugins, *self.beside()], situation or self.situation, **given)

    @contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """Report any error as "does not survive `what`"."""
        try:
            yield
        except Exception as error:
            raise AssertionError(
                f"{self.name!r} does not survive {what}: {type(error).__name__}: {error}\n"
                + "\n".join(getattr(error, "__notes__", ()))
            ) from error


def subject(given: Given, beside: Callable[[], Iterable[Plugin]], leave_out: Iterable[str]) -> Subject:
    """Make the Subject of a plugin."""
    make: Make = (lambda: copy.deepcopy(given)) if isinstance(given, Plugin) else given
    plugin = make()
    assert isinstance(plugin, Plugin), f"{plugin!r} is no forge.Plugin."
    assert make() is not plugin, "`make` returned one object twice; it must make a new plugin each time."
    left = set(leave_out)
    situations = tuple(situation for situation in SITUATIONS if situation.name not in left)
    assert situations, "leave_out names every situation: keep at least one."
    return Subject(plugin.name, make, beside, situations)


def fit(
    plugins: Iterable[Plugin],
    situation: Situation,
    *,
    task: TaskModule | None = None,
    folder: Path | None = None,
    **trainer_options: Any,
) -> tuple[TaskModule, FitResult]:
    """Fit in a run folder, a temporary one unless given, so that sinks can write."""
    if folder is None and trainer_options.get("run_dir") is not False:
        with tempfile.TemporaryDirectory() as temporary:
            return fit(plugins, situation, task=task, folder=Path(temporary), **trainer_options)
    stack = list(plugins)
    if situation.window > 1 and not any(owns(plugin, "forge_plan_step") for plugin in stack):
        stack.append(FixedWindow(situation.window))
    asked: dict[str, Any] = {"max_epochs": None, "max_updates": UPDATES, "run_dir": folder}
    if folder is not None:
        asked["resume"] = "auto"
    return fit_tiny(stack, task=task or situation.task(), **{**asked, **trainer_options})


def owns(plugin: Plugin, hook: str) -> bool:
    """Return whether the plugin implements the hook without wrapping it."""
    return getattr(plugin, hook, None) is not None and not wraps(plugin, hook)


def wraps(plugin: Plugin, hook: str) -> bool:
    return bool(getattr(getattr(plugin, hook, None), "forge_impl", {}).get("wrapper"))


class FixedWindow(Plugin):
    """Accumulates over a fixed window: the kit depends on no other plugin."""

    def __init__(self, window: int):
        super().__init__()
        self.name, self.window = "forge.testing.window", window

    @hookimpl
    def forge_plan_step(self) -> int:
        return self.window
