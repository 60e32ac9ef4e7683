"""Choose the run to resume, its checkpoint, and the run folder.

First `choose` a folder, then lock it, then `find` the checkpoint in it: the lock keeps the unfinished work of
another process from being removed or missed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge import registry
from forge.checkpoint import Checkpoints, StoredCheckpoint, wait_until_written
from forge.checkpoint.readers import Readers
from forge.contract.run import Run
from forge.data.workers import refuse_in_starting_worker
from forge.env import Env
from forge.errors import CheckpointError
from forge.runs.card import group_of, new_run_dir
from forge.runs.folder import RunFolder
from forge.runs.job import another_job, changed_plan, job_of
from forge.util.files import absolute
from forge.util.text import short_path

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
    refuse_in_starting_worker()
    wanted: Any = trainer.wanted_run_dir
    if trainer.resume is None:
        return RunChoice(_new_folder(trainer, task))
    if wanted is False:
        raise CheckpointError("resume= needs a run folder; run_dir=False forbids one.")
    if trainer.resume != "auto":
        return _from_path(trainer, task, absolute(trainer.resume))
    if wanted is not None:
        folder = absolute(wanted)
        refuse_another_job(trainer, _card_of(folder), folder)
        return RunChoice(folder, folder)
    group = Path("runs") / group_of(trainer.recipe, task)
    found = run_of_job(trainer, absolute(group))
    return RunChoice(found, found) if found else RunChoice(_new_folder(trainer, task))


def refuse_another_job(
    trainer: Run, then: Mapping[str, Any], place: Path | str, instead: str = "run folder for a new run"
) -> None:
    """Raise if a place that the user named holds another job, by what was written of it; with allow_inexact, warn."""
    # the checkpoint itself refuses another seed, whatever is allowed
    odd = another_job(then, {**job_of(trainer), "seed": then.get("seed")}) if then else ""
    if odd and not trainer.allow_inexact:
        raise CheckpointError(
            f"{place} holds another job: {odd}. Give it its former value, choose another {instead}, or "
            "continue anyway with allow_inexact=True (trainer.allow_inexact=true on the command line)."
        )
    if odd:
        logger.warning("%s holds another job: %s. The resumed run will differ (allow_inexact).", place, odd)


def run_of_job(trainer: Run, group: Path) -> Path | None:
    """Return the newest run of a group with the job of this Trainer; without one, log why a new run begins."""
    now, reason = job_of(trainer), ""
    for run in newest_first(group):
        then = run.card
        odd = another_job(then, now) if then else "it has no card.json"
        changed = changed_plan(then, now) if then and not odd else ""
        if not odd and not changed:
            return run.path
        how = f"; --run-dir {short_path(run.path)} --resume continues it all the same" if changed else ""
        reason = reason or f"the newest, {run.path.name}, is another job: {odd or changed}{how}"
    logger.info("Nothing to resume in %s%s: a new run.", short_path(group), f" ({reason})" if reason else "")
    return None


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


def named_weights(trainer: Run, weights: Any, task: str) -> Any:
    """Return the path of "best": the best checkpoint of the run just made, else of the newest of its group; any other
    value unchanged."""
    if weights != "best" or Path(weights).exists():
        return weights
    wanted: Any = trainer.run_dir or trainer.wanted_run_dir
    group = absolute(Path("runs") / group_of(trainer.recipe, task))
    runs = [absolute(wanted)] if wanted else [run.path for run in newest_first(group)]
    links = (checkpoints_of(run).folder / "best" for run in runs)
    found = next((link.resolve() for link in links if link.exists()), None)
    if found is None:
        where = f"{short_path(runs[0])} has no best checkpoint" if runs else f"no run is in {short_path(group)}"
        how = registry.advice("best", "Train with {}, or name")
        raise CheckpointError(f'weights="best": {where}. {how or "Name"} a run, a checkpoint or a file.')
    logger.info("The best weights are those of %s.", short_path(found))
    return found


def newest(trainer: Run) -> StoredCheckpoint:
    """Return the newest valid checkpoint of the running fit, after waiting for one being written."""
    run_dir = trainer.run_dir
    with trainer.env.no_timeout():
        wait_until_written()
        found = None if run_dir is None else checkpoints_of(run_dir).newest_valid(Readers.of(trainer.env))
    if found is None:
        raise CheckpointError(f"No checkpoint to return to yet. Save more often{registry.advice('rewind', ': {}')}.")
    return found


def checkpoints_of(run_dir: Path) -> Checkpoints:
    return Checkpoints(run_dir / "checkpoints")


def newest_first(group: Path) -> list[RunFolder]:
    """Return the run folders of a group that hold checkpoints, by the time in UTC at which they were last started."""
    if not group.is_dir():
        return []
    runs = [RunFolder(folder) for folder in group.iterdir() if folder.is_dir() and checkpoints_of(folder).all()]
    return sorted(runs, key=lambda run: (run.started, run.path.name), reverse=True)


def _card_of(folder: Path) -> Mapping[str, Any]:
    return RunFolder(folder).card if checkpoints_of(folder).all() else {}


def _new_folder(trainer: Run, task: str) -> Path | None:
    """Return the folder of a new run; raise if it already holds checkpoints."""
    wanted: Any = trainer.wanted_run_dir
    if wanted is False:
        return None
    if wanted is None:
        return absolute(new_run_dir(group_of(trainer.recipe, task)))
    there = checkpoints_of(Path(wanted)).all()
    if there:
        raise CheckpointError(
            f"{wanted} already holds the checkpoints of a run (up to {there[-1].name}). Use --resume or "
            'resume="auto" to continue it, or choose another run folder.'
        )
    return absolute(wanted)  # the working directory may change later


def _from_path(trainer: Run, task: str, path: Path) -> RunChoice:
    """Resume a run folder in place; a single checkpoint, or another run, starts a new run."""
    wanted: Any = trainer.wanted_run_dir
    is_run = (path / "checkpoints").is_dir()
    if is_run and (wanted is None or Path(wanted).resolve() == path.resolve()):
        refuse_another_job(trainer, _card_of(path), path)
        return RunChoice(path, path)
    return RunChoice(_new_folder(trainer, task), path)
