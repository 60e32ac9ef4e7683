"""Check of runs: a resumed fit, and a second fit with the same object; of an observer, a fit without it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from forge.checkpoint import Checkpoints, write_checkpoint
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.engine.trainer import Trainer
from forge.testing.subject import Situation, Subject
from forge.testing.watch import CURES, METRICS, apart, watched
from forge.twin.record import Record

CUT = 4
"""The update at which a fit is resumed: in the middle of an epoch."""


def check_runs(subject: Subject) -> None:
    """In every situation check a fit, an observer's side effects, a second fit by the same object, a resumed fit."""
    for situation in subject.situations:
        plugin = subject.make()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            with subject.surviving(situation.name):
                straight = watched(subject, plugin, SaveOnce(), situation=situation, folder=folder)
            if plugin.observer:
                _check_observer(subject, situation, straight)
            _check_again(subject, situation, plugin, straight)
            _check_resumed(subject, situation, straight, folder)


def _check_observer(subject: Subject, situation: Situation, straight: Record) -> None:
    """Compare a fit that the plugin observed with one without it."""

    def alone() -> Record:
        return watched(subject, situation=situation)

    found = apart(straight, alone(), alone)
    assert found is None, (
        f"{subject.name!r} declares observer = True, but {situation.name} goes differently with it: {found}."
        f"{CURES.get(found.kind, '')}"
    )


def _check_again(subject: Subject, situation: Situation, plugin: Plugin, straight: Record) -> None:
    def fresh() -> Record:
        return watched(subject, subject.make(), situation=situation)

    with subject.surviving(f"{situation.name} with an object that has served another"):
        again = watched(subject, plugin, situation=situation)
    found = apart(again, straight, fresh)
    if found is None or found.aside:
        return
    unrepeatable = apart(fresh(), straight, fresh)
    assert unrepeatable is None, (
        f"{subject.name!r} makes {situation.name} end differently each time, also with a new object: {unrepeatable}. "
        "It depends on the time, or on random numbers that the run's seed does not set. Draw from torch's or Python's "
        "global generator, or from one that forge_start seeds by trainer.seed and forge_state_dict saves."
    )
    raise AssertionError(
        f"{subject.name!r} carries state from one run into the next, so {situation.name} ends differently the second "
        f"time: {found}. Make the state of a run in forge_start, not in __init__."
    )


def _check_resumed(subject: Subject, situation: Situation, straight: Record, folder: Path) -> None:
    saved = Checkpoints(folder / "checkpoints")
    for other in saved.all():  # of the plugin itself
        if other.name >= saved.path(CUT).name:
            saved.remove(other)
    saved.folder.mkdir(exist_ok=True)
    (folder / SaveOnce.FOLDER / saved.path(CUT).name).rename(saved.path(CUT))
    with subject.surviving(f"{situation.name} that is resumed at update {CUT}"):
        resumed = watched(subject, subject.make(), SaveOnce(), situation=situation, folder=folder)
    # what acts may count its actions from zero
    left_out = () if subject.make().observer else (METRICS,)
    ours, rest = (
        record.where(lambda mark: (mark.update or 0) > CUT and mark.kind not in left_out)
        for record in (resumed, straight)
    )
    found = apart(ours, rest, lambda: watched(subject, subject.make(), SaveOnce(), situation=situation))
    assert found is None, (
        f"{situation.name.capitalize()} with {subject.name!r} that is resumed at update {CUT} "
        f"{'has other metrics or another state' if found.aside else 'ends differently'}: {found}. Return its state "
        "from forge_state_dict, and restore it in forge_load_state_dict."
    )


class SaveOnce(Plugin):
    """Saves one checkpoint: the kit depends on no other plugin."""

    observer = True
    FOLDER = "saved-by-the-kit"

    def __init__(self) -> None:
        super().__init__()
        self.name = "forge.testing.saver"

    @hookimpl
    def forge_boundary(self, trainer: Trainer) -> None:
        if trainer.progress.update == CUT:
            trainer.request_checkpoint("to be resumed from", by=self.name)

    @hookimpl
    def forge_save(self, trainer: Trainer, capture: dict[str, Any]) -> None:
        if trainer.progress.update == CUT:
            assert trainer.run_dir is not None
            write_checkpoint(Checkpoints(trainer.run_dir / self.FOLDER).path(CUT), capture)
