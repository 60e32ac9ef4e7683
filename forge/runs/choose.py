"""Choose the run to resume, its checkpoint, and the run folder.

First `choose` a folder, then lock it, then `find` the checkpoint in it: the lock keeps the unfinished work of
another process from being removed or missed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.checkpoint import Checkpoints, StoredCheckpoint, wait_until_written
from forge.checkpoint.readers import Readers
from forge.env import Env
from forge.errors import CheckpointError
from forge.runs.card import group_of, new_run_dir

if TYPE_CHECKING:
    from forge.contract.run import Run

logger = logging.getLogger("forge")


@dataclass(frozen=True, slots=True)
class RunChoice:
    """The run folder of a fit, and the run folder or checkpoint that it resumes."""

    run_dir: Path | None
    source: Path | None = None

    @property
    def continues(self) -> bool:
        """Whether the run resumes in its own folder, rather than starting a new one from another."""
        return self.source is not None and self.source == self.run_dir


def choose(trainer: Run, task: str) -> RunChoice:
    """Choose the run folder for a fit of the task named `task`; nothing is written or removed."""
    wanted: Any = trainer.wanted_run_dir
    if trainer.resume is None:
        return RunChoice(_new_folder(trainer, task))
    if wanted is False:
        raise CheckpointError("resume= needs a run folder; run_dir=False forbids one.")
    if trainer.resume != "auto":
        return _from_path(trainer, task, Path(trainer.resume).absolute())
    if wanted is not None:
        folder = Path(wanted).absolute()
        return RunChoice(folder, folder)
    group = Path("runs") / group_of(trainer.recipe, task)
    newest = newest_run(group.absolute())
    if newest is None:
        logger.info("Nothing to resume in %s: a new run.", group)
        return RunChoice(_new_folder(trainer, task))
    return RunChoice(newest, newest)


def find(choice: RunChoice, env: Env) -> StoredCheckpoint | None:
    """Return the checkpoint to resume from; None if the chosen run has none yet. Called on all ranks."""
    source = choice.source
    if source is None:
        return None
    if not choice.continues:
        return env.from_first(lambda: StoredCheckpoint.find(source))
    folder = checkpoints_of(source)
    env.from_first(folder.sweep)  # finishes replacements that a kill interrupted
    found = folder.newest_valid(Readers.of(env))
    if found is None and folder.all():
        raise CheckpointError(
            f"None of the {len(folder.all())} checkpoints in {folder.folder} is valid. Remove them to start afresh."
        )
    if found is None and env.is_main:
        logger.info("Nothing to resume in %s: a new run.", source)
    return found


def newest(trainer: Run) -> StoredCheckpoint:
    """Return the newest valid checkpoint of the running fit, after waiting for one being written."""
    run_dir = trainer.run_dir
    with trainer.env.no_timeout():
        wait_until_written()
        found = None if run_dir is None else checkpoints_of(run_dir).newest_valid(Readers.of(trainer.env))
    if found is None:
        raise CheckpointError("No checkpoint to return to yet. Save more often: checkpoint.every.")
    return found


def checkpoints_of(run_dir: Path) -> Checkpoints:
    return Checkpoints(run_dir / "checkpoints")


def newest_run(group: Path) -> Path | None:
    """Return the newest run folder of a group that holds checkpoints; names begin with the time."""
    if not group.is_dir():
        return None
    runs = [folder for folder in group.iterdir() if folder.is_dir() and checkpoints_of(folder).all()]
    return max(runs, key=lambda folder: folder.name, default=None)


def _new_folder(trainer: Run, task: str) -> Path | None:
    """Return the folder of a new run; raise if it already holds checkpoints."""
    wanted: Any = trainer.wanted_run_dir
    if wanted is False:
        return None
    if wanted is None:
        return new_run_dir(group_of(trainer.recipe, task)).absolute()
    there = checkpoints_of(Path(wanted)).all()
    if there:
        raise CheckpointError(
            f"{wanted} already holds the checkpoints of a run (up to {there[-1].name}). Use --resume or "
            'resume="auto" to continue it, or choose another run folder.'
        )
    return Path(wanted).absolute()  # the working directory may change later


def _from_path(trainer: Run, task: str, path: Path) -> RunChoice:
    """Resume a run folder in place; a single checkpoint, or another run, starts a new run."""
    wanted: Any = trainer.wanted_run_dir
    is_run = (path / "checkpoints").is_dir()
    if is_run and (wanted is None or Path(wanted).resolve() == path.resolve()):
        return RunChoice(path, path)
    return RunChoice(_new_folder(trainer, task), path)
