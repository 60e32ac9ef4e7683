"""Seeing every call of a hook, by whose it is: what the trace of a run and the watch over a plugin's reads share."""

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
    """Puts something around implementations of hooks, for one run, through `trainer.instrument`.

    It stands last in a stack, behind whoever uses that seam as well, and hands on to it.
    """

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self._before: tuple[Instrument | None] | None = None

    def around(self, hook: str, impl: HookImpl, function: Function) -> Function:
        """What to call in the place of `function`; of a wrapper it is the function that makes the generator."""
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
        if hook in ONE_BY_ONE:  # the Trainer calls these itself, one plugin after the other
            impl.function = functools.wraps(plain)(self.around(hook, impl, plain))  # pyright: ignore[reportAttributeAccessIssue]
        return seen

    @hookimpl
    def forge_end(self, trainer: Trainer) -> None:
        if self._before is not None and trainer.instrument == self._instrument:
            (trainer.instrument,) = self._before
        self._before = None
