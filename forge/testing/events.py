"""EventTrace: every hook call of a run in order, by plugin, with assertions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pluggy import HookImpl

from forge.contract.hooks import hookimpl
from forge.contract.stack import SPECS
from forge.engine.trainer import Trainer
from forge.testing.hook_calls import Function, HookCalls


@dataclass(frozen=True, slots=True)
class TracedEvent:
    """One call of one plugin's hook."""

    hook: str
    plugin: str
    "The plugin's name; `core` for the Trainer's own implementation, `task` for the task."
    update: int
    "Updates finished before the call."

    def __str__(self) -> str:
        return f"update {self.update}: {self.plugin}.{self.hook}"


class EventTrace(HookCalls):
    """Record every hook call of a run; put it last in the stack.

    ::

        trace = EventTrace()
        fit_tiny([MyPlugin(), trace])
        trace.assert_order("forge_inspect_grads", "forge_edit_grads", "forge_optimizer_step")
        assert trace.count("forge_step_end", plugin="my_plugin") == 10

    A wrapper is recorded when it is entered. Hooks without an implementation are not called, and not recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = "forge.testing.events"
        self.events: list[TracedEvent] = []
        "All calls in order, over all runs."
        self._trainer: Trainer | None = None

    @property
    def hooks(self) -> list[str]:
        """Return the hooks in the order of their calls; consecutive calls of one hook count once."""
        names = [event.hook for event in self.events]
        return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]

    def count(self, hook: str, plugin: str | None = None) -> int:
        """Return the number of calls of a hook, in all or for one plugin."""
        _known(hook)
        return sum(1 for event in self.events if event.hook == hook and plugin in (None, event.plugin))

    def updates(self, hook: str, plugin: str | None = None) -> list[int]:
        """Return the number of finished updates at each call of a hook."""
        _known(hook)
        return [event.update for event in self.events if event.hook == hook and plugin in (None, event.plugin)]

    def assert_order(self, *hooks: str) -> None:
        """Raise unless these hooks were called in this order, with any calls between them."""
        place = 0
        for hook in hooks:
            _known(hook)
            names = [event.hook for event in self.events]
            assert hook in names[place:], (
                f"{hook} was not called after {hooks[hooks.index(hook) - 1]}; called were, in this order: "
                f"{', '.join(dict.fromkeys(names))}."
                if place
                else f"{hook} was not called at all; called were: {', '.join(dict.fromkeys(names)) or 'no hooks'}."
            )
            place = names.index(hook, place) + 1

    @hookimpl
    def forge_configure(self, trainer: Trainer) -> None:
        self._trainer = trainer
        super().forge_configure(trainer)

    def around(self, hook: str, impl: HookImpl, function: Function) -> Function:
        name = impl.plugin_name
        if impl.plugin is self:
            return function

        def recorded(*args: Any) -> Any:
            assert self._trainer is not None
            self.events.append(TracedEvent(hook, name, self._trainer.progress.update))
            return function(*args)

        return recorded


def _known(hook: str) -> None:
    assert hook in SPECS, f"{hook!r} is no hook of forge."
