"""A second process continues a run at its first checkpoint, to prove that it can be resumed."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forge
from forge.checkpoint import Checkpoints, wait_until_written
from forge.errors import CheckpointError, RecipeError
from forge.runs.card import amend_card
from forge_plugins.rehearse.reasons import ENDED, SHORT, FitStart, why_not, why_not_now
from forge_plugins.rehearse.rehearsal import (
    ERROR,
    REFUSED,
    Continuation,
    CopiedProcess,
    NewProcess,
    Rehearsal,
    Resumes,
)
from forge_plugins.rehearse.verdict import ResumeVerdict

logger = logging.getLogger("forge")

SWITCH = "FORGE_REHEARSE"
"""The environment variable that switches rehearsals off (off): for programs that make many short runs."""
PATIENCE, LONG_PATIENCE = 2.0, 600.0
"""Seconds that the end of a run waits for a rehearsal under way; where `strict` asks for its verdict."""


class Rehearse(forge.Plugin):
    """Prove at a run's first checkpoint that it can be resumed: a second process continues it, and both are compared.

    When to use it: always; it is part of the recipe `default`. It needs a plugin that saves checkpoints into the run
    folder, and a CPU. On several ranks, or where there is no memory for a second process, the run card says that it was
    not rehearsed, and why.

    What you see: one line in the log, and `resume` in the run card and in `forge runs`. A resume that would differ is a
    warning that names the cause, or, with `strict`, the end of the run. An attempt that continues an earlier one is
    compared with it too: what a run has after a checkpoint is kept in RUN/evidence.

    The second process shares nothing with the run, logs nothing and saves nothing. It runs the step, though: a file
    that your code opens by its name is written twice. From the command line it is a new process that runs your file
    again; from Python, on Linux, a copy of your process as it was when `fit` began.

    ::

        forge fit quickstart rehearse.strict=true
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        strict: bool = False
        "Stop a run that cannot be resumed exactly; on an accelerator, rehearse all the same."
        updates: int = 2
        "Updates after the first checkpoint that are rehearsed."

    config: Config
    observer = True
    effects = ("files", "state_dict")

    def __init__(self, *first: bool, **values: Any):
        super().__init__(*first, **values)
        if self.config.updates < 1:
            raise RecipeError(f"rehearse.updates is {self.config.updates}; it must be at least 1.")
        self._part: Continuation | None = None
        "What this plugin does in the second process."
        self._rehearsal: Rehearsal | None = None
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        if self._rehearsal is not None:
            self._rehearsal.end()
        self._rehearsal, self._why_not, self._start = None, None, FitStart()
        self._resumes: Resumes | None = None
        self._saved: tuple[int, int] | None = None
        "The update saved last, and the restores until then."
        self._first: Path | None = None
        "The first checkpoint, until it is found on disk."
        self._failing = False

    # -- the second process -------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        """Have a second process stand by, before anything of this run is made."""
        self._begin()
        is_saved = any("checkpoints" in plugin.provides for plugin in trainer.stack)
        if trainer.verb != "fit" or self._part or not is_saved or trainer.wanted_run_dir is False:
            return
        if os.environ.get(SWITCH) == "off":
            return
        self._resumes = Resumes(self.config.updates)
        self._why_not = why_not(trainer, asked=self.config.strict)
        if self._why_not is None:
            task, loaders = trainer.task, trainer.given_loaders
            play = lambda folder: self.play(trainer, task, loaders, folder)  # noqa: E731
            self._rehearsal = Rehearsal(NewProcess(trainer.again) if trainer.again else CopiedProcess(play))

    def play(self, trainer: Any, task: forge.TaskModule, loaders: dict[str, Any], folder: Path) -> None:
        """Continue the run in `folder` as a second process, without plugins that only observe or save; end there."""
        logging.disable()
        self._part = Continuation(folder, self.config.updates)
        given = trainer.given_plugins or list(trainer.stack)
        acting = [plugin for plugin in given if plugin is self or not _only_looks_or_saves(plugin)]
        try:
            trainer.fit_again(task, loaders, acting, folder / "run")
        except Exception as error:
            is_refused = trainer.step is None  # before its first update
            (folder / ERROR).write_text(f"{REFUSED}{error}" if is_refused else f"{type(error).__name__}: {error}")
            raise

    # -- the run ------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        if trainer.run_dir is None:
            self._begin()
        self._saved = (trainer.saved_at, trainer.restores)

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        if self._part is not None:
            self._part.note(trainer, step)
        if self._resumes is None:
            return
        if (trainer.saved_at, trainer.restores) != self._saved:
            self._see_save(trainer, self._resumes)
        if self._first is not None:
            self._play_first(trainer)
        if self._resumes.watches:
            self._tell(trainer, self._resumes.note(trainer, step, self._rehearsal))
        if self._rehearsal is not None:
            self._tell(trainer, self._rehearsal.verdict())

    def _see_save(self, trainer: forge.Run, resumes: Resumes) -> None:
        """Note a checkpoint that was taken after the last update; the first of a run is to be rehearsed."""
        now, before = (trainer.saved_at, trainer.restores), self._saved
        self._saved = now
        if before is None or now[1] != before[1]:  # the restored state was saved before
            return
        resumes.saved(trainer.saved_at, trainer)
        if resumes.rehearsed is not None or (self._rehearsal is None and self._why_not is None):
            return
        assert trainer.run_dir is not None
        resumes.rehearsed = trainer.saved_at
        reason = self._why_not or why_not_now(trainer, self._start, self.config.strict)
        if reason is None:
            self._first = Checkpoints(trainer.run_dir / "checkpoints").path(trainer.saved_at)
        elif trainer.env.is_main:
            self._tell(trainer, ResumeVerdict("not rehearsed", reason))

    def _play_first(self, trainer: forge.Run) -> None:
        """Begin the rehearsal once the first checkpoint is complete on disk: it has its name from then on."""
        if self._first is not None and self._rehearsal is not None and self._first.exists():
            assert trainer.run_dir is not None
            self._rehearsal.begin(self._first, trainer.run_dir)
            self._first = None

    def _tell(self, trainer: forge.Run, verdict: ResumeVerdict | None) -> None:
        """Tell what a rehearsal has shown, once, and end it."""
        if verdict is None:
            return
        assert trainer.run_dir is not None
        self._end_rehearsal()
        with suppress(OSError):  # it is logged too
            amend_card(trainer.run_dir, str(verdict))
        text = verdict.as_text()
        if verdict.state in ("differs", "refused") and self.config.strict:
            raise CheckpointError(f"{text} rehearse.strict is set, so the run stops here.")
        if not verdict.is_good:
            logger.warning("%s", text, extra={"finding": "state_not_saved"})
        elif verdict.detail not in (ENDED, SHORT):
            logger.info("%s", text)

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failing = True

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        try:
            if self._rehearsal is not None and not self._failing and trainer.run_dir is not None:
                if self._first is not None:
                    wait_until_written()
                    self._play_first(trainer)
                verdict = self._rehearsal.verdict(LONG_PATIENCE if self.config.strict else PATIENCE)
                self._tell(trainer, verdict or ResumeVerdict("not rehearsed", ENDED))
        finally:
            self._begin()

    def _end_rehearsal(self) -> None:
        if self._rehearsal is not None:
            self._rehearsal.end()
        self._rehearsal, self._why_not, self._first = None, None, None


def _only_looks_or_saves(plugin: forge.Plugin) -> bool:
    looks = plugin.observer and getattr(plugin, "forge_build_loader", None) is None
    return looks or getattr(plugin, "forge_save", None) is not None
