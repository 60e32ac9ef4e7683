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
from forge.checkpoint import BackgroundWriter, Checkpoints, Writers, write_checkpoint, write_sharded
from forge.checkpoint import StoredCheckpoint as SavedState
from forge.env import Env
from forge.errors import CheckpointError, RecipeError, StackError, did_you_mean
from forge_plugins._validations import warn_of_none_planned, warn_of_nothing_compared

logger = logging.getLogger("forge")


@dataclass(kw_only=True, slots=True)
class Best:
    """Which checkpoints are worth keeping however old they are."""

    monitor: str
    "The validation metric to compare by, as it is logged: val/accuracy."
    mode: Literal["max", "min"]
    "Whether a larger or a smaller value is better."
    keep: int = 1
    "How many of the best to keep."


class Checkpoint(forge.Plugin):
    """Save the run's whole state to RUN/checkpoints/update-XXXXXXXX, from which `--resume` continues bit for bit.

    It saves at the interval `every`, when a validation is among the best (`best`), when a signal or a plugin stops the
    run, and at the end of the run. It keeps the last `keep` checkpoints and the best. An older one is removed only when
    the new one is complete on disk. Without a run folder nothing is saved.

    When to use it: always; it is part of the recipe `default`.

    With `background`, training continues as soon as the state is copied to host memory; hashing and writing follow in a
    thread. If a write fails, earlier checkpoints stay intact.

    What you see: one directory per checkpoint, and the links `checkpoints/latest` and `checkpoints/best`. `forge ckpt
    show RUN` lists them.

    On several ranks, all ranks write into one directory, each its part. It must be on a file system that all hosts
    share. Any other number of ranks can continue from it.

    ::

        forge fit quickstart checkpoint.every="20 updates" checkpoint.keep=3
        forge fit quickstart --resume
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        every: str | list[str] | None = "1 epoch"
        "How often to save: 500 updates, 1 epoch, 10 min, or a list of these; null: only the best, and at the end."
        keep: int = 2
        "Number of latest checkpoints to keep."
        best: Best | str | None = None  # a str only to answer it with the right form
        "Keep the best too: {monitor: val/accuracy, mode: max}; mode min for a loss, keep: 3 for the best three."
        background: bool = True
        "Write while training continues; needs host memory for one copy of the state."
        on_failure: Literal["stop", "warn"] = "stop"
        "If a write fails: stop the run at its next update, or log an error and try again next time (warn)."

    config: Config
    observer = True
    provides = ("checkpoint",)

    def __init__(self, *first: str | list[str] | None, **values: Any):
        super().__init__(*first, **values)
        config = self.config
        every = [config.every] if isinstance(config.every, str) else config.every or []
        self._every = [forge.Interval(text) for text in every]
        self._watched = watched(config.best)
        for name, count in (("keep", config.keep), ("best.keep", self._watched.keep if self._watched else 1)):
            if count < 1:
                raise RecipeError(f"checkpoint.{name} is {count}; it must be at least 1.")
        if self._watched is None:
            self.forge_evaluate = None  # pyright: ignore[reportAttributeAccessIssue]
        self._forget()

    def _forget(self) -> None:
        self._folder: Checkpoints | None = None
        self._writers: Writers | None = None
        self._writer: BackgroundWriter | None = None
        self._values: dict[int, float] = {}
        "What the monitor gave, by update, for the checkpoints that there are."
        self._written: set[int] = set()
        "Updates saved since the run began, or was last restored."
        self._inherited: set[int] | None = set()
        "Updates saved before that, and still there; None until rank 0 has looked."
        self._writing: int | None = None
        "The update saved last: perhaps not on disk yet."
        self._compared, self._failing = False, False
        "Whether a validation was compared, in this life or one before it; whether the run has failed."

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._forget()
        if trainer.verb != "fit":
            return
        if trainer.run_dir is None:
            if trainer.env.is_main:
                logger.warning("checkpoint: this fit has no run folder, so nothing will be saved.")
            return
        if self._watched is not None and "val" not in trainer.loaders:
            raise StackError(f"checkpoint.best watches {self._watched.monitor!r}, but this fit has no val loader.")
        if self._watched is not None:
            warn_of_none_planned(trainer, "checkpoint.best")
        self._folder = Checkpoints(trainer.run_dir / "checkpoints")
        self._writers = writers_of(trainer.env)
        if trainer.env.is_main:
            self._folder.sweep()
        self._writer = BackgroundWriter(self._writers) if self.config.background else None

    # -- when ---------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run, step: forge.Step) -> None:
        if self._folder is None:
            return
        if self._writer is not None and (self._writers is None or self.config.on_failure == "stop"):
            # several ranks hear of a failure at different updates: what they do about it must wait for the next save
            self._look(self._writer.check)
        due = [interval for interval in self._every if interval.due(step)]  # all are asked: a clock starts when it is
        if due:
            trainer.request_checkpoint(f"every {due[0]}", everywhere=True, by=self.name)

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: forge.Run, stage: str) -> Generator[None, Any, Any]:
        metrics = yield
        if self._folder is not None and stage == "val":
            self._compare(trainer, metrics)
        return metrics

    def _compare(self, trainer: forge.Run, metrics: dict[str, Any]) -> None:
        """Ask for a checkpoint of this update if it is among the best; of equals, the earlier stays."""
        best, update = self._watched, trainer.progress.update
        assert best is not None
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if best.monitor not in numbers:
            raise RecipeError(
                f"checkpoint.best.monitor is {best.monitor!r}, which this validation does not give."
                f"{did_you_mean(best.monitor, numbers)} Metrics: {', '.join(sorted(numbers)) or 'none'}."
            )
        value, self._compared = float(numbers[best.monitor]), True
        self._values = self._standing(trainer)
        if math.isfinite(value):
            self._values[update] = value
            if update in self._best():
                trainer.request_checkpoint(
                    f"{best.monitor} = {value:.5g} is among the best", everywhere=True, by=self.name
                )

    def _standing(self, trainer: forge.Run) -> dict[int, float]:
        """The values whose checkpoint was saved, the same on all ranks; another folder has none of what a state names.

        Only rank 0 looks into the folder, and once: its writer removes old ones there meanwhile.
        """
        assert self._folder is not None
        if self._inherited is None:
            there = updates(self._folder) if trainer.env.is_main else []
            self._inherited = set(there if self._writers is None else trainer.env.broadcast(there))
        saved = {*self._written, *self._inherited, self._writing}
        return {update: value for update, value in self._values.items() if update in saved}

    def _best(self) -> list[int]:
        """The updates to keep for their value, best first."""
        best = self._watched
        return ranking(self._values, best.mode)[: best.keep] if best is not None else []

    # -- saving -------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_save(self, trainer: forge.Run, capture: dict[str, Any]) -> None:
        if self._folder is None:
            return
        began = time.perf_counter()
        if self._writer is not None:
            self._look(self._writer.wait)  # what became of the last one decides what this one may remove
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
        """What to do in the folder once this checkpoint is there."""
        assert self._folder is not None
        before = -1 if trainer.resumed_from is None else trainer.resumed_from
        # what is neither this life's nor from before it was restored belongs to a course that was given up
        lineage = [u for u in updates(self._folder) if u < update and (u in self._written or u <= before)]
        best = self._best()
        folder, keep = self._folder, {*[*lineage, update][-self.config.keep :], *best}
        return lambda: tidy(folder, update, best[:1], keep)

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
            warn_of_nothing_compared(trainer, "checkpoint.best")
        try:
            if self._writer is not None:
                self._look(self._writer.close)
        finally:
            self._folder = self._writer = None

    def _look(self, ask: Callable[[], None]) -> None:
        """Hear what became of the last write."""
        try:
            ask()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """A write that failed is no checkpoint: nothing counts on it."""
        assert self._folder is not None
        update, self._writing = self._writing, None
        if update is not None:
            self._written.discard(update)
            self._values.pop(update, None)
        text = f"There is no checkpoint of update {update} in {self._folder.folder}. {error}"
        if self.config.on_failure == "stop":
            raise CheckpointError(f"{text} The run stops here; with checkpoint.on_failure=warn it goes on.") from error
        if self._writers is None or self._writers.is_main:
            logger.error("%s The run goes on, and saves when it is due again.", text)

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
    """The ranks that save together; None where there is one process."""
    if env.world == 1:
        return None
    if env.store is None:
        raise StackError(
            f"{env.world} ranks save their state together through a torch.distributed Store, and the Env of this run's "
            "strategy has none. Let it set `store`."
        )
    return Writers(env.rank, env.world, env.store)


def watched(best: Best | str | None) -> Best | None:
    """What `best` names; a metric alone does not say whether more of it is better."""
    if isinstance(best, str):
        mode = "min" if "loss" in best else "max"
        raise RecipeError(
            f"checkpoint.best is {best!r}, but it takes a metric and whether a larger or a smaller value is better. "
            f"Write best: {{monitor: {best}, mode: {mode}}}, or checkpoint.best.monitor={best} "
            f"checkpoint.best.mode={mode}."
        )
    return best


def ranking(values: Mapping[int, float], mode: str) -> list[int]:
    """Updates by value, best first; of equals the earlier is better."""
    sign = -1.0 if mode == "max" else 1.0
    return sorted(values, key=lambda update: (sign * values[update], update))


def updates(folder: Checkpoints) -> list[int]:
    """The updates that a folder has checkpoints of, in order."""
    return [SavedState(path).update for path in folder.all()]


def tidy(folder: Checkpoints, update: int, best: list[int], keep: set[int]) -> None:
    """Once a checkpoint is published: point at it, then remove what is kept no longer. Runs in the writer's thread."""
    try:
        folder.point("latest", folder.path(update))
        if best:
            folder.point("best", folder.path(best[0]))
        for number in updates(folder):
            if number not in keep:
                folder.remove(folder.path(number))
    except (OSError, CheckpointError) as error:
        logger.warning("The checkpoint of update %d is saved, but older ones could not be removed: %s", update, error)
