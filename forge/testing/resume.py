"""Check of state: `forge_state_dict`, a resumed fit, and a second fit with the same object; of an observer, a fit
without it."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from forge.checkpoint import Checkpoints, write_checkpoint
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.engine.trainer import Trainer
from forge.testing.subject import Situation, Subject
from forge.testing.watch import CURES, apart, watched
from forge.twin.compare import first_difference
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
        saved.remove(other)
    saved.folder.mkdir(exist_ok=True)
    (folder / SaveOnce.FOLDER / saved.path(CUT).name).rename(saved.path(CUT))
    with subject.surviving(f"{situation.name} that is resumed at update {CUT}"):
        resumed = watched(subject, subject.make(), SaveOnce(), situation=situation, folder=folder)
    rest = straight.where(lambda mark: (mark.update or 0) > CUT)
    found = apart(resumed, rest, lambda: watched(subject, subject.make(), SaveOnce(), situation=situation))
    if found is None or (found.aside and not subject.make().observer):  # what acts may count its actions from zero
        return
    raise AssertionError(
        f"{situation.name.capitalize()} with {subject.name!r} that is resumed at update {CUT} "
        f"{'logs other metrics' if found.aside else 'ends differently'}: {found}. Return its state from "
        "forge_state_dict, and restore it in forge_load_state_dict."
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


# -- state ------------------------------------------------------------------------------------------------------------


def check_state(subject: Subject) -> None:
    """Check that forge_state_dict returns plain data, and that forge_load_state_dict restores it."""
    plugin = subject.make()
    gives, takes = (getattr(plugin, hook, None) is not None for hook in ("forge_state_dict", "forge_load_state_dict"))
    assert gives == takes, (
        f"{subject.name!r} defines only {'forge_state_dict' if gives else 'forge_load_state_dict'}: saved state must "
        "be restored, and the reverse. Define both."
    )
    if not gives:
        return
    giver, taker = StateProbe(plugin), subject.make()
    with subject.surviving("saving its state"):
        subject.fit(plugin, giver)
    if giver.state is None:
        return
    _check_plain(giver.state, f"forge_state_dict of {subject.name!r}")
    probe = StateProbe(taker, copy.deepcopy(giver.state))
    with subject.surviving("restoring its state"):
        subject.fit(taker, probe)
    found = first_difference({"state": probe.taken}, {"state": giver.state})
    assert found is None, (
        f"{subject.name!r} does not restore its state: after forge_load_state_dict they differ {found}."
    )


class StateProbe(Plugin):
    """Loads a state into `plugin` at the start, and records its state at the end of every update."""

    observer = True

    def __init__(self, plugin: Plugin, given: dict[str, Any] | None = None):
        super().__init__()
        self.name, self.plugin, self.given = "forge.testing.state", plugin, given
        self.state: dict[str, Any] | None = None
        self.taken: dict[str, Any] | None = None

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        if self.given is not None:
            dict(trainer.stack.implementations("forge_load_state_dict"))[self.plugin.name](trainer, self.given)
            self.taken = self._state(trainer)

    @hookimpl
    def forge_boundary(self, trainer: Trainer) -> None:
        self.state = self._state(trainer)

    def _state(self, trainer: Trainer) -> dict[str, Any] | None:
        state = dict(trainer.stack.implementations("forge_state_dict"))[self.plugin.name](trainer)
        _check_plain(state, f"forge_state_dict of {self.plugin.name!r}")  # before the copy, which may fail
        return copy.deepcopy(state)


def _check_plain(value: Any, path: str) -> None:
    """Raise unless a checkpoint can hold the value: None, numbers, strings, tensors, lists, dicts with string keys."""
    if value is None or isinstance(value, (bool, int, float, str, Tensor)):
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            assert isinstance(key, str), f"{path} has the key {key!r}; keys must be strings."
            _check_plain(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            _check_plain(inner, f"{path}[{i}]")
    else:
        raise AssertionError(
            f"{path} is a {type(value).__name__}; a state consists of None, numbers, strings, tensors, lists and dicts."
        )
