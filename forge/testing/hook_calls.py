"""HookCalls: wrap the implementations of hooks for one run; base of the event trace and of the capturable check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pluggy import HookImpl

from forge.contract.dispatch import Instrument
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.stack import ONE_BY_ONE
from forge.engine.trainer import Trainer

Function = Callable[..., Any]


class HookCalls(Plugin):
    """Wraps implementations of hooks for one run, through `trainer.instrument`.

    It must be last in a stack, after other users of `instrument`, which it calls in turn.
    """

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self._before: tuple[Instrument | None] | None = None

    def around(self, hook: str, impl: HookImpl, function: Function) -> Function:
        """Return the function to call instead of `function`, which makes the generator if `impl` is a wrapper."""
        raise NotImplementedError

    @hookimpl
    def forge_configure(self, trainer: Trainer) -> None:
        self._before = (trainer.instrument,)
        trainer.instrument = self._instrument

    def _instrument(self, hook: str, impl: HookImpl) -> Function:
        inner = self._before[0] if self._before is not None else None
        plain = impl.function
        function = plain if inner is None else inner(hook, impl)
        seen = self.around(hook, impl, function)
        if seen is function:
            return function
        if hook in ONE_BY_ONE:  # the Trainer calls these itself, plugin by plugin
            impl.function = functools.wraps(plain)(self.around(hook, impl, plain))  # pyright: ignore[reportAttributeAccessIssue]
        return seen

    @hookimpl
    def forge_end(self, trainer: Trainer) -> None:
        if self._before is not None and trainer.instrument == self._instrument:
            (trainer.instrument,) = self._before
        self._before = None
