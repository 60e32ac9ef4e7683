"""Goodput: where the time of a run goes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forge
from forge.errors import RecipeError
from forge.runs import goodput as records
from forge.torch_internals import dynamo_is_loaded
from forge.util import clock
from forge.util.files import atomic_write
from forge_plugins import torch_internals as internals

logger = logging.getLogger("forge")

EVERY = 10.0
"""Seconds between two writes of the account; a kill loses the time since the last one."""
SHOWN_EVERY = 60.0
"""Seconds between two texts for the loggers."""
MOST_MARKS = 100
"""Checkpoints whose moments are kept: a run goes on from one of the newest."""
STALL = (10.0, 1.0)
"""An update is a stall if it takes this many times as long as usual, and this many seconds."""
WEIGHT = 0.05
"""Of the latest update in what is usual."""


def compiled_frames() -> list[Any]:
    """Return what torch has compiled in this process, as far as it reports it."""
    return list(internals.compilation_metrics()) if dynamo_is_loaded() else []


class Goodput(forge.Plugin):
    """Account for the time of a run: the share in updates that count, and where the rest went.

    When to use it: always; it is part of the recipe `default`, and costs two µs per update.

    What you see: the card of the run, `forge runs`, reports and loggers (a text at a checkpoint, once a minute at most)
    have the share of the wall time that was spent in updates that count, over all attempts of the run: goodput. The
    rest is the start of each attempt, compiling, waiting for data, validation, checkpoints (the time that training
    waits for them), stalls, logs, and work that was lost: what an attempt did after the checkpoint that the next one
    went on from, or that a rewind went back to. The parts add up to the wall time of all attempts. Time between
    attempts, as in a queue, is told beside it.

    An attempt begins when its fit is configured, so the import of torch is not in it. A stall is an update that takes
    ten times as long as usual, and over a second: the excess counts. Compiling is what torch reports of it. Times are
    the host's, on rank 0; a device that is behind is waited for in a checkpoint or a log. The account is written to
    RUN/goodput.json every ten seconds, at checkpoints and at the end: of a killed attempt up to ten seconds are
    missing, and count as time between attempts.

    ::

        forge fit quickstart -p goodput trainer.max_epochs=2
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        promised: float | None = None
        "The share that was expected, shown beside the measured one: 0.93."

    config: Config
    observer = True
    effects = ("files",)

    def __init__(self, *first: float | None, **values: Any):
        super().__init__(*first, **values)
        promised = self.config.promised
        if promised is not None and not 0 < promised <= 1:
            raise RecipeError(f"goodput.promised is {promised:g}; it is a share, above 0 and at most 1.")
        self._forget()

    def _forget(self) -> None:
        """Reset the state of one run."""
        self._active = False
        self._folder: Path | None = None
        self._parts = dict.fromkeys(records.PARTS, 0.0)
        self._part = "start"
        "What the time since `_last` is spent on."
        self._last = clock.clock()
        self._began = time.time()
        self._from = 0
        "The update that this attempt went on from."
        self._marks: list[records.Mark] = []
        self._earlier: list[records.TimedAttempt] = []
        self._step: forge.Step | None = None
        self._update = 0
        "The update that training is at."
        self._saved = -1
        "The update of the last checkpoint."
        self._usual: float | None = None
        "Seconds of an update."
        self._written = self._shown = self._last
        self._frame: Any = None
        "The last thing that torch compiled, and that was counted."

    # -- the clock ----------------------------------------------------------------------------------------------------

    def _switch(self, part: str) -> float:
        """Count the time since the last switch, and spend what follows on another part; return that time."""
        now = clock.clock()
        passed = now - self._last
        self._parts[self._part] += passed
        self._part, self._last = part, now
        return passed

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        self._forget()
        self._active = trainer.verb == "fit"
        self._frame = next(reversed(compiled_frames()), None)  # what was compiled before is not this run's

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        if self._active and self._step is not step:
            self._arrive(step)
        return (yield)

    def _arrive(self, step: forge.Step) -> None:
        """Count what lies between two updates: waiting for data, and before that the part that is written down."""
        trainer, saved = step.trainer, step.trainer.saved_at
        if step.index < self._update:  # a rewind
            self._switch("other")
            self._parts = records.since(self._parts, self._marks, step.index)
            self._marks = [mark for mark in self._marks if mark[0] <= step.index]
        elif saved != self._saved and self._step is not None:
            self._part = "checkpoint"  # since the update or its validation ended
        is_saved, before = self._part == "checkpoint", self._part
        passed = self._switch("update")
        waited = min(step.data_wait, passed)
        self._parts[before] -= waited
        if self._step is None:
            self._begin(trainer)
        elif is_saved:
            self._marks = [*self._marks[:1], *self._marks[1:][-MOST_MARKS:], (saved, dict(self._parts))]
        self._parts["data"] += waited
        if is_saved:
            self._write()
            if self._last - self._shown > SHOWN_EVERY:
                self._shown = self._last
                self._show(trainer)
        self._step, self._update, self._saved = step, step.index, saved

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        if not self._active or self._step is not step:  # a window that was left out
            return
        now = clock.clock()  # `_switch`, written out: it runs in every update
        passed = now - self._last
        self._parts[self._part] += passed
        self._part, self._last = "other", now
        usual = self._usual
        if step.index == self._from:
            pass  # the first update warms up
        elif usual is None:
            self._usual = passed
        elif passed > STALL[1] and passed > STALL[0] * usual:
            excess = max(0.0, passed - usual - self._count_compiled())
            self._parts["update"] -= excess
            self._parts["stall"] += excess
        else:
            self._usual = usual + WEIGHT * (passed - usual)
        if self._last - self._written > EVERY:
            self._write()

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self) -> Generator[None, Any, Any]:
        before = self._part
        self._switch("validation")
        try:
            return (yield)
        finally:
            self._switch(before)

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if self._active and self._step is not None:
            is_saved = trainer.saved_at != self._saved
            self._part = "checkpoint" if is_saved else self._part
            self._switch("other")
            if is_saved:
                self._marks.append((trainer.saved_at, dict(self._parts)))
            self._write()
        self._active = False

    # -- the account --------------------------------------------------------------------------------------------------

    def _begin(self, trainer: forge.Run) -> None:
        """Begin an attempt at its first update, when it is known what it goes on from."""
        self._from = self._update = trainer.resumed_from or 0
        self._folder = trainer.run_dir if trainer.env.is_main else None
        if self._folder is not None and trainer.resumed_from is not None:
            self._earlier = records.attempts_in(self._folder)
        self._marks = [(self._from, dict(self._parts))]

    def _count_compiled(self) -> float:
        """Count the seconds in which torch compiled since the last call, as far as it reports them, and return them."""
        frames = compiled_frames()
        seen = next((number for number, frame in enumerate(frames) if frame is self._frame), -1)
        self._frame = frames[-1] if frames else None
        took = sum((getattr(frame, "duration_us", None) or 0) / 1e6 for frame in frames[seen + 1 :])
        took = min(took, self._parts["update"])
        self._parts["update"] -= took
        self._parts["compile"] += took
        return took

    def _write(self) -> None:
        self._count_compiled()
        self._written = self._last
        if self._folder is None:
            return
        attempts = [*self._earlier, self._attempt()]
        record = {
            "promised": self.config.promised,
            "attempts": [
                {"began": one.began, "update": one.update, "parts": one.parts, "marks": one.marks} for one in attempts
            ],
        }
        try:
            with atomic_write(self._folder / records.FILE) as beside:
                beside.write_text(json.dumps(record) + "\n")
        except OSError as error:
            self._folder = None
            logger.error("goodput: %s cannot be written, and is no more: %s.", records.FILE, error)

    def _attempt(self) -> records.TimedAttempt:
        return records.TimedAttempt(self._began, self._from, self._parts, tuple(self._marks))

    def _show(self, trainer: forge.Run) -> None:
        spent = records.account([*self._earlier, self._attempt()], self.config.promised)
        if spent is not None:
            trainer.publish({"goodput": forge.Text(spent.markdown())})
