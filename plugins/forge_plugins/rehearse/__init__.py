"""The plugin `rehearse`: prove at a run's first checkpoint that the run can be resumed."""

from __future__ import annotations

import logging
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forge
from forge.checkpoint import Checkpoints, wait_until_written
from forge.errors import CheckpointError, RecipeError
from forge.runs.card import amend_card
from forge.twin.record import Record
from forge.util.apart import Copy
from forge_plugins.rehearse.second_process import FOLDER, noted, second_processes, why_none
from forge_plugins.rehearse.verdict import ENDED, ResumeVerdict, judged, not_rehearsed

logger = logging.getLogger("forge")

SWITCH = "FORGE_REHEARSE"
"""The environment variable that switches rehearsals off (off): for programs that make many short runs."""
PATIENCE, LONG_PATIENCE = 2.0, 600.0
"""Seconds that the end of a run waits for a rehearsal under way; where `strict` asks for its verdict."""


class Rehearse(forge.Plugin):
    """Prove at a run's first checkpoint that it can be resumed: a second process continues it, and both are compared.

    When to use it: always; it is part of the recipe `default`. It works where one process trains on a CPU, with a
    plugin that saves checkpoints into the run folder. Elsewhere the run card says that the run was not rehearsed, and
    why; `forge verify-resume` tells there.

    What you see: one line in the log, and `resume` in the run card and in `forge runs`. A resume that would differ is a
    warning that names the cause, or, with `strict`, the end of the run.

    The second process is a copy of yours as it was when `fit` began. It shares nothing with the run, logs nothing and
    saves nothing. It runs the step, though: a file that your code opens by its name is written twice.

    ::

        forge fit quickstart rehearse.strict=true
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        strict: bool = False
        "Stop a run that cannot be resumed exactly."
        updates: int = 2
        "Updates after the first checkpoint that are rehearsed."

    config: Config
    observer = True
    effects = ("files", "state_dict")

    def __init__(self, *first: bool, **values: Any):
        super().__init__(*first, **values)
        if self.config.updates < 1:
            raise RecipeError(f"rehearse.updates is {self.config.updates}; it must be at least 1.")
        self._copies: list[Copy] = []
        self._folder: Path | None = None
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._end_copies()
        self._why_none = ""
        self._updates: range | None = None
        "The updates after the first checkpoint."
        self._kept: Path | None = None
        "The checkpoint that the second processes continue from."
        self._record, self._is_noted = Record(), False
        "What the run has after these, and whether it is complete."
        self._said: list[dict[str, Any]] = []
        "What the second processes say, each once."

    def _end_copies(self) -> None:
        for copy in self._copies:
            copy.end()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._copies, self._folder = [], None

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        """Have second processes stand by, before anything of this run is made."""
        self._begin()
        is_saved = trainer.wanted_run_dir is not False and any("checkpoints" in each.provides for each in trainer.stack)
        if trainer.verb == "fit" and is_saved and os.environ.get(SWITCH) != "off":
            self._why_none = why_none(trainer)
            self._copies = [] if self._why_none else second_processes(trainer)

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        if trainer.env.world > 1 and self._copies:
            self._why_none = "it runs on several ranks"
            self._end_copies()
        if not (self._copies or self._why_none) or not trainer.env.is_main:
            trainer.switch_hooks(self, "forge_boundary", on=False)

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        if self._updates is None and trainer.saved_at not in (-1, trainer.resumed_from):
            self._rehearse(trainer)
        if self._updates is not None:
            self._keep(trainer)
            self._is_noted = self._is_noted or noted(self._record, trainer, step, self._updates)
            verdict = self._verdict(0.0)
            if verdict is not None:
                self._tell(trainer, verdict)

    def _rehearse(self, trainer: forge.Run) -> None:
        """Have a second process continue the run from the checkpoint that was taken after the last update."""
        if self._why_none:
            self._tell(trainer, not_rehearsed(self._why_none))
            return
        assert trainer.run_dir is not None
        self._updates = range(trainer.saved_at + 1, trainer.saved_at + 1 + self.config.updates)
        self._folder = trainer.run_dir / FOLDER
        shutil.rmtree(self._folder, ignore_errors=True)  # of an attempt that was killed

    def _keep(self, trainer: forge.Run) -> None:
        """Once the checkpoint is complete, keep it from being removed, and have the first copy continue."""
        if self._kept is not None:
            return
        assert trainer.run_dir is not None
        assert self._folder is not None
        assert self._updates is not None
        update = self._updates.start - 1
        saved = Checkpoints(trainer.run_dir / "checkpoints").path(update)
        if saved.exists():  # it has its name once it is complete
            self._kept = self._folder / saved.name
            shutil.copytree(saved, self._kept, copy_function=os.link)
            self._copies[0].tell((self._kept, self._updates))
        elif trainer.saved_at > update:  # a save waits for the one before
            self._tell(trainer, not_rehearsed("its first checkpoint was replaced too soon"))

    def _verdict(self, patience: float) -> ResumeVerdict | None:
        """Return what the comparison says, if it can within so many seconds."""
        until = time.monotonic() + patience
        while self._is_noted and self._kept is not None and self._copies:
            try:
                self._said.append(self._copies[len(self._said)].hear(max(0.0, until - time.monotonic())))
            except TimeoutError:
                return None
            except EOFError:
                self._said.append({"failed": "it ended without a word"})
            verdict = judged(self._record, self._said)
            if verdict is not None:
                return verdict
            self._copies[1].tell((self._kept, self._updates))  # does the resume differ, or does every run?
        return None

    def _tell(self, trainer: forge.Run, verdict: ResumeVerdict) -> None:
        """Tell what the rehearsal has shown; nothing is left to do then."""
        assert trainer.run_dir is not None
        trainer.switch_hooks(self, "forge_boundary", on=False)
        self._end_copies()
        with suppress(OSError):  # it is logged too
            amend_card(trainer.run_dir, str(verdict))
        if verdict.state in ("differs", "refused") and self.config.strict:
            raise CheckpointError(f"{verdict.text} rehearse.strict is set, so the run stops here.")
        if not verdict.is_good:
            logger.warning("%s", verdict.text, extra={"finding": "state_not_saved"})
        elif verdict.detail != ENDED:
            logger.info("%s", verdict.text)

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._end_copies()

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        try:
            if self._copies and self._updates is not None:
                wait_until_written()
                self._keep(trainer)
            if self._copies:
                verdict = self._verdict(LONG_PATIENCE if self.config.strict else PATIENCE)
                self._tell(trainer, verdict or not_rehearsed(ENDED))
        finally:
            self._begin()
