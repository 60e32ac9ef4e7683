"""Checkpoints of a run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import forge
from forge import registry
from forge.checkpoint import BackgroundWriter, Checkpoints, Writers, write_checkpoint, write_sharded
from forge.checkpoint import StoredCheckpoint as SavedState
from forge.diagnose.validations import warn_of_none_planned, warn_of_nothing_compared
from forge.env import Env
from forge.errors import CheckpointError, RecipeError, StackError, did_you_mean

logger = logging.getLogger("forge")


@dataclass(kw_only=True, slots=True)
class Best:
    """The best checkpoints, kept whatever their age."""

    monitor: str
    "The metric to compare by, by its logged name: val/accuracy, train/loss_epoch."
    mode: Literal["max", "min"]
    "Whether a larger or a smaller value is better."
    keep: int = 1
    "Number of best checkpoints to keep."


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
        self._folder: Checkpoints | None = None
        self._writers: Writers | None = None
        self._writer: BackgroundWriter | None = None
        self._mirror: Any = None
        self._kept: set[int] | None = None
        "The updates that the last clean-up kept."
        self._values: dict[int, float] = {}
        "The monitored value by update, of the checkpoints that exist."
        self._written: set[int] = set()
        "Updates saved since the run began, or was last restored."
        self._inherited: set[int] | None = set()
        "Updates saved before that and still on disk; None until rank 0 has listed them."
        self._writing: int | None = None
        "The update saved last, possibly not on disk yet."
        self._compared, self._failing = False, False
        "Whether a finite value was compared, in this attempt or an earlier one; whether the run has failed."
        self._never_finite: str | None = None
        "Why nothing was compared, once a validation has given a value that is not finite."

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
        self._folder = Checkpoints(trainer.run_dir / "checkpoints")
        self._writers = writers_of(trainer.env)
        if trainer.env.is_main:
            self._folder.sweep()
        self._writer = BackgroundWriter(self._writers) if self.config.background else None
        if self._remote is not None:
            remote, folder = self._remote, self._folder
            with trainer.env.no_timeout():
                trainer.env.from_first(lambda: remote.begin(trainer, folder))
            if trainer.env.is_main:  # an earlier attempt may have left checkpoints to upload
                self._mirror = remote.mirror(trainer.run_dir, folder)
                self._mirror.hold(updates(folder))

    # -- when ---------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        if self._folder is None:
            return
        if self._writer is not None and (self._writers is None or self.config.on_failure == "stop"):
            # ranks learn of a failure at different updates, so they act on it together at the next save
            self._check(self._writer.check)
        for interval in self._every:  # all: a clock starts with its first check
            if interval.due(step):
                trainer.request_checkpoint(f"every {interval}", everywhere=True, by=self.name)

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: forge.Run, stage: str) -> Generator[None, Any, Any]:
        metrics = yield
        if self._folder is not None and stage == "val" and trainer.progress.update:  # not before training
            self._compare(trainer, metrics)
        return metrics

    @forge.hookimpl
    def forge_log(self, trainer: forge.Run, metrics: dict[str, Any]) -> None:
        if self._folder is not None and self._watched is not None and self._watched.monitor in metrics:
            self._compare(trainer, metrics)

    def _compare(self, trainer: forge.Run, metrics: dict[str, Any]) -> None:
        """Request a checkpoint of this update if it is among the best; of equal values the earlier wins."""
        best, update = self._watched, trainer.progress.update
        assert best is not None
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if best.monitor not in numbers:
            raise RecipeError(
                f"checkpoint.best.monitor is {best.monitor!r}, which this validation does not give."
                f"{did_you_mean(best.monitor, numbers)} Metrics: {', '.join(sorted(numbers)) or 'none'}."
            )
        value = float(numbers[best.monitor])
        self._values = self._standing(trainer)
        if not math.isfinite(value):
            self._never_finite = f"{best.monitor} was never a finite number, so there is no best checkpoint."
        else:
            self._compared = True
            self._values[update] = value
            if update in self._best():
                reason = f"{best.monitor} = {value:.5g} is among the best"
                trainer.request_checkpoint(reason, everywhere=True, by=self.name)

    def _standing(self, trainer: forge.Run) -> dict[int, float]:
        """Return the values whose checkpoint exists, equal on all ranks; a new run folder has none of the state's.

        Only rank 0 lists the folder, and only once, since its writer removes old checkpoints meanwhile.
        """
        assert self._folder is not None
        if self._inherited is None:
            there = updates(self._folder) if trainer.env.is_main else []
            self._inherited = set(there if self._writers is None else trainer.env.broadcast(there))
        saved = {*self._written, *self._inherited, self._writing}
        return {update: value for update, value in self._values.items() if update in saved}

    def _best(self) -> list[int]:
        """Return the updates to keep for their value, best first."""
        best = self._watched
        return ranking(self._values, best.mode)[: best.keep] if best is not None else []

    # -- saving -------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_save(self, trainer: forge.Run, capture: dict[str, Any]) -> None:
        if self._folder is None:
            return
        began = time.perf_counter()
        if self._writer is not None:
            self._check(self._writer.wait)  # the result of the last write decides which checkpoints may be removed
        update = self._writing = trainer.progress.update
        self._values = self._standing(trainer)
        then = self._tidying(trainer, update) if trainer.env.is_main else None
        try:
            self._write(self._folder.path(update), capture, then)
        except Exception as error:
            self._failed(error)
            return
        self._written.add(update)
        waited = time.perf_counter() - began
        if trainer.env.is_main:
            level = logging.INFO if waited > 1 else logging.DEBUG
            logger.log(level, "checkpoint of update %d: training waited %.0f ms", update, 1e3 * waited)

    def _tidying(self, trainer: forge.Run, update: int) -> Callable[[], None]:
        """Return the clean-up to run once this checkpoint is written."""
        assert self._folder is not None
        before = -1 if trainer.resumed_from is None else trainer.resumed_from
        # checkpoints neither of this attempt nor from before its restore belong to an abandoned course
        lineage = [u for u in updates(self._folder) if u < update and (u in self._written or u <= before)]
        best = self._best()
        latest = 0 if self.config.keep == "all" else -self.config.keep
        folder, keep, mirror = self._folder, {*[*lineage, update][latest:], *best}, self._mirror

        def clean() -> None:
            self._kept = keep
            if mirror is not None:
                mirror.hold(keep)  # first: what it uploads now is in use, and what it uploads next is kept
            tidy(folder, update, best[:1], keep if mirror is None else keep | mirror.in_use())

        return clean

    def _write(self, path: Path, capture: dict[str, Any], then: Callable[[], None] | None) -> None:
        if self._writer is not None:
            self._writer.submit(path, capture, then)
        elif self._writers is not None:
            write_sharded(path, capture, self._writers, then)
        else:
            write_checkpoint(path, capture)
            if then is not None:
                then()

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failing = True

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if self._folder is not None and self._watched is not None and not (self._compared or self._failing):
            never = None if self._by_validation else f"{self._watched.monitor} was never logged."
            warn_of_nothing_compared(trainer, "checkpoint.best", self._never_finite or never)
        try:
            if self._writer is not None:
                self._check(self._writer.close)
        finally:
            try:
                if self._mirror is not None:
                    self._close_mirror(trainer, self._mirror)
            finally:
                self._folder = self._writer = self._mirror = None

    def _close_mirror(self, trainer: forge.Run, mirror: Any) -> None:
        """Wait for the uploads; of an otherwise good run a failed one is an error."""
        assert self._folder is not None
        try:
            with trainer.env.no_timeout():
                mirror.close()
        except CheckpointError as error:  # the mirror has logged it
            if self.config.on_failure == "stop" and not self._failing:
                text = f"{error} They are complete in {self._folder.folder}: --resume uploads them."
                raise CheckpointError(text) from error
        if trainer.env.is_main and self._kept is not None:
            for number in set(updates(self._folder)) - self._kept:  # an upload was using it
                self._folder.remove(self._folder.path(number))

    def _check(self, ask: Callable[[], None]) -> None:
        """Check the result of the last write."""
        try:
            ask()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Forget the checkpoint whose write failed, then stop or log, as configured."""
        assert self._folder is not None
        update, self._writing = self._writing, None
        if update is not None:
            self._written.discard(update)
            self._values.pop(update, None)
        text = f"The checkpoint of update {update} in {self._folder.folder} was not written. {error}"
        if self.config.on_failure == "stop":
            text += " The run stops here; with checkpoint.on_failure=warn it continues."
            raise CheckpointError(text) from error
        if self._writers is None or self._writers.is_main:
            logger.error("%s The run continues, and saves again when due.", text)

    # -- state --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        best = self._watched
        if best is None:
            return {}
        entries = [{"update": update, "value": self._values[update]} for update in self._best()]
        return {"monitor": best.monitor, "mode": best.mode, "best": entries}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        self._written, self._inherited, self._values = set(), None, {}
        best = self._watched
        if best is not None and (state.get("monitor"), state.get("mode")) == (best.monitor, best.mode):
            self._values = {entry["update"]: entry["value"] for entry in state["best"]}
            self._compared |= bool(self._values)


def writers_of(env: Env) -> Writers | None:
    """Return the ranks that save together; None for a single process."""
    if env.world == 1:
        return None
    if env.store is None:
        raise StackError(
            f"{env.world} ranks save their state together through a torch.distributed Store, but the Env of this run's "
            "strategy has none. Set its `store`."
        )
    return Writers(env.rank, env.world, env.store)


def watched(best: Best | str | None) -> Best | None:
    """Return the option `best`; refuse a metric alone, which leaves open whether larger is better."""
    if isinstance(best, str):
        mode = "min" if "loss" in best else "max"
        raise RecipeError(
            f"checkpoint.best is {best!r}, but it needs a metric and a mode: max if larger is better, else min. "
            f"Write best: {{monitor: {best}, mode: {mode}}}, or checkpoint.best.monitor={best} "
            f"checkpoint.best.mode={mode}."
        )
    return best


def ranking(values: Mapping[int, float], mode: str) -> list[int]:
    """Return updates by value, best first; of equal values the earlier first."""
    sign = -1.0 if mode == "max" else 1.0
    return sorted(values, key=lambda update: (sign * values[update], update))


def updates(folder: Checkpoints) -> list[int]:
    """Return the updates of a folder's checkpoints, in order."""
    return [SavedState(path).update for path in folder.all()]


def tidy(folder: Checkpoints, update: int, best: list[int], keep: set[int]) -> None:
    """Link to a new checkpoint, then remove those not in `keep`. Runs in the writer's thread."""
    try:
        folder.point("latest", folder.path(update))
        if best:
            folder.point("best", folder.path(best[0]))
        for number in updates(folder):
            if number not in keep:
                folder.remove(folder.path(number))
    except (OSError, CheckpointError) as error:
        logger.warning("The checkpoint of update %d is saved, but older ones could not be removed: %s", update, error)
