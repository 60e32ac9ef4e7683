"""Resumption: which run is continued, from which checkpoint, and in which folder.

First `choose` a folder, then lock it, then `find` the checkpoint in it: what another process is doing there is neither
tidied away nor overlooked.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.checkpoint import Checkpoint, Checkpoints, settle
from forge.errors import CheckpointError
from forge.runs.card import group_of, new_run_dir

if TYPE_CHECKING:
    from forge.contract.run import Run

logger = logging.getLogger("forge")


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a fit writes, and the run folder or checkpoint that it goes on from."""

    run_dir: Path | None
    source: Path | None = None

    @property
    def continues(self) -> bool:
        """Whether the run goes on in its own folder, rather than branching off another."""
        return self.source is not None and self.source == self.run_dir


def choose(trainer: Run, task: str) -> Choice:
    """Decide where a fit of the task called `task` writes; nothing is written or removed."""
    wanted: Any = trainer.wanted_run_dir
    if trainer.resume is None:
        return Choice(_new_folder(trainer, task))
    if wanted is False:
        raise CheckpointError("resume= needs a run folder to go on in; run_dir=False forbids one.")
    if trainer.resume != "auto":
        return _from_path(trainer, task, Path(trainer.resume).absolute())
    if wanted is not None:
        folder = Path(wanted).absolute()
        return Choice(folder, folder)
    group = Path("runs") / group_of(trainer.recipe, task)
    newest = newest_run(group.absolute())
    if newest is None:
        logger.info("Nothing to resume in %s: a new run.", group)
        return Choice(_new_folder(trainer, task))
    return Choice(newest, newest)


def find(choice: Choice) -> Checkpoint | None:
    """The checkpoint to go on from; None where the chosen run has none yet."""
    if choice.source is None:
        return None
    if not choice.continues:
        return Checkpoint.find(choice.source)
    folder = checkpoints_of(choice.source)
    folder.sweep()  # what a kill left half replaced gets its name back
    found = folder.newest_valid()
    if found is None and folder.all():
        raise CheckpointError(
            f"None of the {len(folder.all())} checkpoints in {folder.folder} is valid. Remove them to start afresh."
        )
    if found is None:
        logger.info("Nothing to resume in %s: a new run.", choice.source)
    return found


def newest(trainer: Run) -> Checkpoint:
    """The newest valid checkpoint of the running fit, the one that is still being written included."""
    run_dir = trainer.run_dir
    with trainer.env.no_timeout():
        settle()
        found = None if run_dir is None else trainer.env.from_first(checkpoints_of(run_dir).newest_valid)
    if found is None:
        raise CheckpointError("There is no checkpoint to go back to yet. Save more often: checkpoint.every.")
    return found


def checkpoints_of(run_dir: Path) -> Checkpoints:
    return Checkpoints(run_dir / "checkpoints")


def newest_run(group: Path) -> Path | None:
    """The newest run folder of a group that holds checkpoints; names begin with their time."""
    if not group.is_dir():
        return None
    runs = [folder for folder in group.iterdir() if folder.is_dir() and checkpoints_of(folder).all()]
    return max(runs, key=lambda folder: folder.name, default=None)


def _new_folder(trainer: Run, task: str) -> Path | None:
    """A folder for a new run. One that holds a run's checkpoints is not trained over."""
    wanted: Any = trainer.wanted_run_dir
    if wanted is False:
        return None
    if wanted is None:
        return new_run_dir(group_of(trainer.recipe, task)).absolute()
    there = checkpoints_of(Path(wanted)).all()
    if there:
        raise CheckpointError(
            f"{wanted} holds the checkpoints of a run already (up to {there[-1].name}). Say --resume or "
            'resume="auto" to continue it, or choose another run folder.'
        )
    return Path(wanted).absolute()  # whatever the process does about its working directory


def _from_path(trainer: Run, task: str, path: Path) -> Choice:
    """A run folder is continued where it is; a single checkpoint, or another run, is where a new run begins."""
    wanted: Any = trainer.wanted_run_dir
    is_run = (path / "checkpoints").is_dir()
    if is_run and (wanted is None or Path(wanted).resolve() == path.resolve()):
        return Choice(path, path)
    return Choice(_new_folder(trainer, task), path)
