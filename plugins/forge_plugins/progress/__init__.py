"""Progress display."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import forge
from forge.runs.card import ending
from forge.util.notebook import notebook_shell
from forge_plugins.progress.bar import REFRESH, Bar
from forge_plugins.progress.lines import Lines
from forge_plugins.progress.opening import opening
from forge_plugins.progress.screen import on_terminal
from forge_plugins.progress.status import NEVER, Status, share_of_epoch

STAGES = {"val": "validating", "test": "testing", "predict": "predicting"}


class Progress(forge.Plugin):
    """Show progress, speed, remaining time and the latest metrics, and a table of results at the end.

    When to use it: always; it is part of the recipe `default`. `forge fit -q` shows only warnings and errors; in a
    script `logging.getLogger("forge").setLevel(logging.WARNING)` does the same.

    What you see: a line with the device, the parameters, the precision and the batch. On a terminal, two live bars, one
    for the epoch and one for the run, above which your own output appears. At the end a table has the last and the best
    value of every metric, and lines name the run folder and how to look at it. In a file or in CI, plain lines: at the
    interval `every`, at the end of every epoch, after every validation and at the end of the run. At an epoch's end
    they have the epoch's means (`train/loss_epoch`), between logs those of the last interval (`train/loss`). In a
    notebook, a bar, a table and the curves of all metrics, redrawn in the cell's output. All of it but that goes to
    stderr, so stdout stays free for your program.

    Only the main process writes. If stderr can no longer be written (a pipe whose reader is gone), the plugin stops
    writing and the run continues.

    ::

        forge fit quickstart progress.every="10 updates"
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        every: str = "10 s"
        "How often to write a line if the output is not a terminal, besides epochs and validations."

    config: Config
    observer = True
    provides = ("result_table",)

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        forge.Interval(self.config.every)  # refuse an invalid interval now
        self._view: Any = None
        "A display: `look` after an update, `refresh` after another change, `close` at the end."
        self._look_at = NEVER
        self._status = Status()

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._view, self._look_at = None, NEVER
        if not trainer.env.is_main or logging.getLogger("forge").level > logging.INFO:
            return
        plan = trainer.planned_updates, trainer.max_epochs
        self._status = Status(trainer.verb or "", *plan, plugins=trainer.stack.names)
        self._status.epoch_share, self._status.per_epoch = share_of_epoch(trainer), trainer.updates_per_epoch
        self._status.opening = opening(trainer) if trainer.verb == "fit" else ""
        self._view = self._display()
        self._look_at = 0.0

    def _display(self) -> Any:
        shell = notebook_shell()
        if shell is not None:
            from forge_plugins.progress.page import Page

            return Page(self._status, shell)
        return Bar(self._status) if on_terminal() else Lines(self._status, forge.Interval(self.config.every))

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        # on every update: only a look at the clock
        if (time.monotonic() >= self._look_at or step.ends_epoch) and self._view is not None:
            self._status.move(trainer)
            self._look_at = self._view.look(step)

    @forge.hookimpl
    def forge_log(self, update: int, metrics: dict[str, Any]) -> None:
        if self._view is not None and self._status.log(update, metrics):
            self._look_at = 0.0

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: forge.Run, stage: str) -> Generator[None, Any, Any]:
        if self._view is None:
            return (yield)
        self._status.move(trainer)
        self._status.doing, began = STAGES.get(stage, stage), time.monotonic()
        if self._status.evaluation_took > REFRESH:  # a short one would be over before it is read
            self._view.refresh()
        try:
            return (yield)
        finally:
            self._status.doing, self._status.evaluation_took = "", time.monotonic() - began
            self._status.paused += self._status.evaluation_took

    @forge.hookimpl
    def forge_exception(self, error: BaseException) -> None:
        self._status.ending = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        view, self._view, self._look_at = self._view, None, NEVER
        if view is not None:
            status = self._status
            status.move(trainer)
            status.ending = status.ending or "done"
            status.run_dir, status.best_since = trainer.run_dir, trainer.resumed_from or None
            status.reason, status.was_complete = ending(trainer, None)[1], trainer.resumed_from == status.update
            view.close()
