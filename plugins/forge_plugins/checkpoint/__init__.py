"""The plugin `checkpoint`: when a run is saved. What is kept is in `kept`, how it gets there in `publish`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import forge
from forge import registry
from forge.diagnose.validations import warn_of_none_planned, warn_of_nothing_compared
from forge.env import Env
from forge.errors import CheckpointError, RecipeError, StackError
from forge_plugins.checkpoint.kept import Best, Kept, watched
from forge_plugins.checkpoint.publish import Publisher

logger = logging.getLogger("forge")


class Checkpoint(forge.Plugin):
    """Save the run's whole state to RUN/checkpoints/update-XXXXXXXX, from which `--resume` continues bit for bit.

    It saves at the interval `every`, when a validation is among the best (`best`), when a signal or a plugin stops the
    run, and at the end of the run. It keeps the last `keep` checkpoints (all with `keep=all`) and the best. An older
    one is removed only when the new one is complete on disk. Without a run folder nothing is saved.

    When to use it: always; it is part of the recipe `default`. `--weights best`, and `weights="best"` in Python, take
    the best checkpoint of the newest run, or of the run that the Trainer has just made.

    With `background`, training continues as soon as the state is copied to host memory; hashing and writing follow in a
    thread. If a write fails, earlier checkpoints stay intact.

    What you see: one directory per checkpoint, and the links `checkpoints/latest` and `checkpoints/best`. `forge ckpt
    show RUN` lists them.

    On several ranks, all ranks write into one directory, each its part. It must be on a file system that all hosts
    share. Any other number of ranks can continue from it.

    With `remote` (`checkpoint.remote=s3://bucket/runs/{run}`), a thread uploads what is kept to object storage, and
    `--resume` on a machine without the run fetches it from there. A checkpoint counts there once its manifest is
    uploaded, as the last file. If an upload fails, it is tried again with the next checkpoint; a failure at the end
    fails the run. Credentials come from the environment.

    ::

        forge fit quickstart checkpoint.every="20 updates" checkpoint.keep=3
        forge fit quickstart --resume
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        every: str | list[str] | None = "1 epoch"
        "How often to save: 500 updates, 1 epoch, 10 min, or a list of these; null: only the best, and at the end."
        keep: int | Literal["all"] = 2
        "Number of latest checkpoints to keep, or all."
        best: Best | str | None = None  # a str only to answer with the right form
        "Keep the best too: {monitor: val/accuracy, mode: max}, mode min for a loss; keep: 3 for the best three."
        background: bool = True
        "Write while training continues; needs host memory for one copy of the state."
        on_failure: Literal["stop", "warn"] = "stop"
        "After a failed write: stop the run at its next update, or log an error and save again when due."
        remote: str | None = None
        "URL to upload checkpoints to and to resume from: s3://bucket/place; {run} in it is the name of the run folder."

    config: Config
    observer = True
    effects = ("files", "state_dict")
    provides = ("checkpoints",)
    cures = {
        "best": "{name}.best={{monitor: val/loss, mode: min}}",
        "rewind": "{name}.every",
        "remote": "{name}.remote={url}",
    }

    def __init__(self, *first: str | list[str] | None, **values: Any):
        super().__init__(*first, **values)
        config = self.config
        every = [config.every] if isinstance(config.every, str) else config.every or []
        self._every = [forge.Interval(text) for text in every]
        self._watched = watched(config.best)
        best = self._watched.keep if self._watched else 1
        for name, count in (("keep", config.keep), ("best.keep", best)):
            if isinstance(count, int) and count < 1:
                raise RecipeError(f"checkpoint.{name} is {count}; it must be at least 1.")
        self._remote = None if config.remote is None else registry.load("storage", "runs").RemoteRun(config.remote)
        if self._remote is None:
            self.forge_setup_env = None  # pyright: ignore[reportAttributeAccessIssue]
        self._by_validation = self._watched is not None and self._watched.monitor.startswith("val/")
        if not self._by_validation:
            self.forge_evaluate = None  # pyright: ignore[reportAttributeAccessIssue]
        if self._watched is None or self._by_validation:
            self.forge_log = None  # pyright: ignore[reportAttributeAccessIssue]
        self._forget()

    def _forget(self) -> None:
        self._kept, self._failing = Kept(self.config.keep, self._watched), False
        self._publisher: Publisher | None = None
        "What writes; None where nothing is saved."

    @forge.hookimpl(wrapper=True)
    def forge_setup_env(self, trainer: forge.Run) -> Generator[None, Env, Env]:
        env, remote = (yield), self._remote
        if remote is not None and trainer.verb == "fit":  # before the run to be resumed is chosen
            with env.no_timeout():
                folder = env.from_first(lambda: remote.fetch(trainer))
            trainer.resume = folder or trainer.resume
        return env

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._forget()
        if trainer.verb != "fit":
            return
        if trainer.run_dir is None:
            if trainer.env.is_main:
                logger.warning("checkpoint: this fit has no run folder, so nothing will be saved.")
            return
        if self._watched is not None and self._by_validation and "val" not in trainer.loaders:
            raise StackError(
                f"checkpoint.best watches {self._watched.monitor!r}, but this fit has no val loader. Pass one, or "
                "watch a training metric such as train/loss_epoch."
            )
        if self._by_validation:
            warn_of_none_planned(trainer, "checkpoint.best")
        self._publisher = Publisher(trainer, self.config.background, self._remote)

    # -- when ---------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        if self._publisher is None:
            return
        # ranks learn of a failure at different updates, so they act on it together at the next save
        acts_now = trainer.env.world == 1 or self.config.on_failure == "stop"
        if self._kept.writing is not None and acts_now and not self._hear(self._publisher.writer.check):
            self._kept.writing = None
        for interval in self._every:  # all: a clock starts with its first check
            if (step.ends_epoch or interval.unit != "epoch") and interval.due(step):
                trainer.request_checkpoint(f"every {interval}", everywhere=True, by=self.name)

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: forge.Run, stage: str) -> Generator[None, Any, Any]:
        metrics = yield
        if stage == "val" and trainer.progress.update:  # not before training
            self._compare(trainer, metrics)
        return metrics

    @forge.hookimpl
    def forge_log(self, trainer: forge.Run, metrics: dict[str, Any]) -> None:
        if self._watched is not None and self._watched.monitor in metrics:
            self._compare(trainer, metrics)

    def _compare(self, trainer: forge.Run, metrics: dict[str, Any]) -> None:
        """Request a checkpoint of this update if it is among the best; of equal values the earlier wins."""
        if self._publisher is None:
            return
        self._kept.forget_gone(self._publisher.folder, trainer.env)
        reason = self._kept.compare(trainer.progress.update, metrics)
        if reason is not None:
            trainer.request_checkpoint(reason, everywhere=True, by=self.name)

    # -- saving -------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_save(self, trainer: forge.Run, capture: dict[str, Any]) -> None:
        publisher, kept, update = self._publisher, self._kept, trainer.progress.update
        if publisher is None:
            return
        self._hear(publisher.writer.wait)  # the result of the last write decides which checkpoints may be removed
        kept.writing = update
        kept.forget_gone(publisher.folder, trainer.env)
        keep = kept.after(update, publisher.folder, trainer.resumed_from) if trainer.env.is_main else set()
        kept.written.add(update)
        self._hear(lambda: publisher.publish(update, capture, keep, kept.best()))

    def _hear(self, act: Callable[[], bool | None]) -> bool | None:
        """Do what may tell that a write has failed; then forget that checkpoint, and stop or log, as configured."""
        assert self._publisher is not None
        try:
            return act()
        except Exception as error:
            update = self._kept.forget_last()
            text = f"The checkpoint of update {update} in {self._publisher.folder.folder} was not written. {error}"
            if self.config.on_failure == "stop":
                text += " The run stops here; with checkpoint.on_failure=warn it continues."
                raise CheckpointError(text) from error
            if self._publisher.env.is_main:
                logger.error("%s The run continues, and saves again when due.", text)

    # -- the end ------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failing = True

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if self._publisher is None:
            return
        if self._watched is not None and not (self._kept.compared or self._failing):
            warn_of_nothing_compared(trainer, "checkpoint.best", self._kept.why_none)
        is_error = self.config.on_failure == "stop" and not self._failing
        try:
            self._hear(self._publisher.writer.close)
        finally:
            publisher, self._publisher = self._publisher, None
            with nullcontext() if is_error else suppress(CheckpointError):  # a failed upload was logged
                publisher.end_uploads()

    # -- state --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return self._kept.state_dict()

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept.load_state_dict(state)
