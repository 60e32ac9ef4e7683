"""Check of state: `forge_state_dict`, a resumed fit, and a second fit with the same object."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.checkpoint import Checkpoints, write_checkpoint
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.engine.trainer import Trainer
from forge.testing.metric_difference import metric_difference
from forge.testing.observer import check_observer
from forge.testing.runs import LogProbe
from forge.testing.subject import Situation, Subject
from forge.testing.weights import first_difference

CUT = 4
"""The update at which a fit is resumed: in the middle of an epoch."""


def check_runs(subject: Subject) -> None:
    """In every situation check a fit, an observer's side effects, a second fit by the same object, a resumed fit."""
    for situation in subject.situations:
        plugin, log = subject.make(), LogProbe()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            with subject.surviving(situation.name):
                straight, result = subject.fit(plugin, SaveOnce(), log, situation=situation, folder=folder)
            if plugin.observer:
                check_observer(subject, situation, plugin, (straight, result))
            _check_again(subject, situation, plugin, straight)
            _check_resumed(subject, situation, straight, log, folder)


def _check_again(subject: Subject, situation: Situation, plugin: Plugin, first: TaskModule) -> None:
    with subject.surviving(f"{situation.name} with an object that has served another"):
        again, _ = subject.fit(plugin, situation=situation)
    difference = first_difference(again, first)
    if difference is None:
        return
    fresh, _ = subject.fit(subject.make(), situation=situation)
    unrepeatable = first_difference(fresh, first)
    assert unrepeatable is None, (
        f"{subject.name!r} makes {situation.name} end differently each time, also with a new object: {unrepeatable} It "
        "depends on the time, or on random numbers that the run's seed does not set. Draw from torch's or Python's "
        "global generator, or from one that forge_start seeds by trainer.seed and forge_state_dict saves."
    )
    raise AssertionError(
        f"{subject.name!r} carries state from one run into the next, so {situation.name} ends differently the second "
        f"time: {difference} Make the state of a run in forge_start, not in __init__."
    )


def _check_resumed(subject: Subject, situation: Situation, straight: TaskModule, log: LogProbe, folder: Path) -> None:
    saved = Checkpoints(folder / "checkpoints")
    for other in saved.all():  # of the plugin itself
        saved.remove(other)
    saved.folder.mkdir(exist_ok=True)
    (folder / SaveOnce.FOLDER / saved.path(CUT).name).rename(saved.path(CUT))
    with subject.surviving(f"{situation.name} that is resumed at update {CUT}"):
        second = LogProbe()
        resumed, _ = subject.fit(subject.make(), SaveOnce(), second, situation=situation, folder=folder)
    where = f"{situation.name.capitalize()} with {subject.name!r} that is resumed at update {CUT}"
    advice = "Return its state from forge_state_dict, and restore it in forge_load_state_dict."
    difference = first_difference(resumed, straight)
    assert difference is None, f"{where} ends differently: {difference} {advice}"
    if not subject.make().observer:  # a plugin that acts may count its actions from zero in every attempt
        return
    ours, theirs = _numbers(second), _numbers(log, but=_constant(log))
    both = {key: value for key, value in theirs.items() if key in ours}
    difference = metric_difference(ours, theirs, both, lambda: _logged_again(subject, situation))
    assert difference is None, f"{where} logs other metrics: {difference} {advice}"


def _numbers(log: LogProbe, but: Container[str] = ()) -> dict[str, float]:
    """Return every logged number by its name and update."""
    return {
        f"{name} at update {update}": value
        for update, metrics in log.metrics.items()
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and name not in but
    }


def _constant(log: LogProbe) -> set[str]:
    """Return metrics that never change: one measured at the start of a run may differ after a resume."""
    logged = [(name, value) for metrics in log.metrics.values() for name, value in metrics.items()]
    numbers = [(name, value) for name, value in logged if isinstance(value, (int, float))]
    values = {name: [value for other, value in numbers if other == name] for name, _ in numbers}
    return {name for name, each in values.items() if len(each) > 1 and len(set(each)) == 1}


def _logged_again(subject: Subject, situation: Situation) -> dict[str, float]:
    log = LogProbe()
    subject.fit(subject.make(), SaveOnce(), log, situation=situation)
    return _numbers(log)


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
    difference = _state_difference(probe.taken, giver.state, "state")
    assert not difference, (
        f"{subject.name!r} does not restore its state: after forge_load_state_dict its forge_state_dict has "
        f"{difference}."
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


def _state_difference(actual: Any, expected: Any, path: str) -> str:
    """Describe the first difference of two states, or return ""."""
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        difference = first_difference({path: actual}, {path: expected})
        return difference.removesuffix(".") if difference else ""
    if isinstance(actual, Mapping) and isinstance(expected, Mapping) and actual.keys() == expected.keys():
        found = (_state_difference(actual[key], expected[key], f"{path}[{key!r}]") for key in expected)
        return next(filter(None, found), "")
    if isinstance(actual, (list, tuple)) and isinstance(expected, (list, tuple)) and len(actual) == len(expected):
        pairs = enumerate(zip(actual, expected, strict=True))
        return next(filter(None, (_state_difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)), "")
    if type(actual) is type(expected) and not isinstance(actual, torch.Tensor) and actual == expected:
        return ""
    return f"{path} = {actual!r} instead of {expected!r}"
