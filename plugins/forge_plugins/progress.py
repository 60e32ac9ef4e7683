"""Progress on the screen."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.text import Text

import forge

REFRESH = 0.25
"""Seconds between two pictures of the bar: drawing one takes about half a millisecond."""
DOING = {"val": "validating", "test": "testing", "predict": "predicting"}
PLURAL_AT = 1


class Progress(forge.Plugin):
    """Show how far the run is, how fast, how long it will take, and the latest metrics.

    On a terminal this is a live bar that leaves what you print alone. Anywhere else (a file, CI) it is a plain line per
    interval, at the end of every epoch, after every validation and at the end of the run. Both go to stderr, so that
    stdout stays yours. Only the main process shows anything.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        every: str = "10 s"
        "How often to write a plain line where the output is no terminal, beside epochs and validations."

    config: Config
    observer = True

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        self._every = forge.Interval(self.config.every)
        self._view: View | None = None
        self._due = float("inf")
        self._owes_epoch = False

    @forge.hookimpl
    def forge_start(self, trainer: forge.Trainer) -> None:
        self._view, self._due = None, float("inf")
        if not trainer.env.is_main:
            return
        self._every = forge.Interval(self.config.every)
        self._status = Status(trainer.verb or "", trainer.planned_updates, trainer.max_epochs)
        self._view = Bar(self._status) if on_terminal() else Lines(self._status)
        self._due = 0.0

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Trainer, step: forge.Step) -> None:
        # every update passes here: one look at the clock, and out
        if time.monotonic() >= self._due or step.ends_epoch:
            self._look(trainer, step)

    @forge.hookimpl
    def forge_log(self, trainer: forge.Trainer, update: int, metrics: dict[str, Any]) -> None:
        if self._view is not None:
            self._status.log(update, metrics)
            if any(name.startswith("val/") for name in metrics):
                self._due = 0.0

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: forge.Trainer, stage: str) -> Generator[None, Any, Any]:
        if self._view is None:
            return (yield)
        began = time.monotonic()
        self._status.move(trainer.progress)
        self._status.doing = DOING.get(stage, stage)
        self._view.refresh()
        try:
            return (yield)
        finally:
            self._status.doing = ""
            self._status.pause(time.monotonic() - began)

    @forge.hookimpl
    def forge_exception(self, error: BaseException) -> None:
        if self._view is not None:
            self._status.ending = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"

    @forge.hookimpl
    def forge_end(self, trainer: forge.Trainer) -> None:
        view, self._view, self._due = self._view, None, float("inf")
        if view is not None:
            self._status.move(trainer.progress)
            self._status.ending = self._status.ending or "done"
            view.close()

    def _look(self, trainer: forge.Trainer, step: forge.Step) -> None:
        """Draw, or write a line if one is due, and decide when to look again."""
        view = self._view
        if view is None:
            return
        self._status.move(trainer.progress)
        if isinstance(view, Bar):
            view.refresh()
            self._due = time.monotonic() + REFRESH
        elif self._line_is_due(trainer, step):
            view.line()

    def _line_is_due(self, trainer: forge.Trainer, step: forge.Step) -> bool:
        validated, self._due = self._due == 0.0 and self._status.validated, 0.0
        return True
