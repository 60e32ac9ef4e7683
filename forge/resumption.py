"""Resumption: which run is continued, from which checkpoint, and in which folder."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import CheckpointError
from forge.run import group_of, new_run_dir
from forge.state import Checkpoint, Checkpoints, settle

if TYPE_CHECKING:
    from forge.trainer import Trainer

logger = logging.getLogger("forge")


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a fit writes, and the checkpoint it goes on from."""

    run_dir: Path | None
    checkpoint: Checkpoint | None


def plan(trainer: Trainer) -> Plan:
    """Decide, before anything is written."""
    wanted: Any = trainer.wanted_run_dir
    resume = trainer.resume
    if not resume:
        return _fresh(trainer)
    if wanted is False:
        raise CheckpointError("resume= needs a run folder to go on in; run_dir=False forbids one.")
    if str(resume) != "auto":
        return _from_path(trainer, Path(resume))
    folder = Path(wanted) if wanted is not None else newest_run(Path("runs") / group_of(trainer))
    found = _newest_of(folder) if folder is not None else None
    if found is None:
        logger.info("Nothing to resume in %s: a new run.", folder or f"runs/{group_of(trainer)}")
        return _fresh(trainer)
    return Plan(folder, found)


def newest(trainer: Trainer) -> Checkpoint:
    """The newest valid checkpoint of the running fit, the one that is still being written included."""
    settle()
    found = None if trainer.run_dir is None else checkpoints_of(trainer.run_dir).newest_valid()
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


def _fresh(trainer: Trainer) -> Plan:
    wanted: Any = trainer.wanted_run_dir
    if wanted is False:
        return Plan(None, None)
    if wanted is None:
        return Plan(new_run_dir(group_of(trainer)), None)
    there = checkpoints_of(Path(wanted)).all()
    if there:
        raise CheckpointError(
            f"{wanted} holds the checkpoints of a run already (up to {there[-1].name}). Say --resume or "
            'resume="auto" to continue it, or choose another run folder.'
        )
    return Plan(Path(wanted), None)


def _from_path(trainer: Trainer, path: Path) -> Plan:
    """A run folder is continued where it is; a single checkpoint is where a new run begins."""
    wanted: Any = trainer.wanted_run_dir
    if checkpoints_of(path).all():
        if wanted is None or Path(wanted).resolve() == path.resolve():
            return Plan(path, _newest_of(path))
        return Plan(_fresh(trainer).run_dir, _newest_of(path))
    return Plan(_fresh(trainer).run_dir, Checkpoint.find(path))


def _newest_of(run_dir: Path) -> Checkpoint | None:
    """The newest valid checkpoint; a run whose checkpoints are all broken is not started afresh in silence."""
    folder = checkpoints_of(run_dir)
    folder.sweep()  # what a kill left half replaced gets its name back
    found = folder.newest_valid()
    if found is None and folder.all():
        raise CheckpointError(
            f"None of the {len(folder.all())} checkpoints in {folder.folder} is valid. Remove them to start afresh."
        )
    return found
