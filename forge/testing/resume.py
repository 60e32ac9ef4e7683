"""Does a plugin remember what it must, and nothing else? Its state, a resumed fit, a second fit with one object."""

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
"""Where a fit is cut off and resumed: in the middle of an epoch."""


def check_runs(subject: Subject) -> None:
    """In every situation: a fit, what an observer may change in it, a second one by the same object, a resumed one."""
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
    with subject.surviving(f"{situation.name} with an object that served one already"):
        again, _ = subject.fit(plugin, situation=situation)
    difference = first_difference(again, first)
    if difference is None:
        return
    fresh, _ = subject.fit(subject.make(), situation=situation)
    unsteady = first_difference(fresh, first)
    assert unsteady is None, (
        f"{subject.name!r} makes {situation.name} end elsewhere each time, by an object of its own too: {unsteady} It "
        "goes by a clock, or draws numbers that the run's seed does not decide. Draw from torch's or Python's global "
        "generator, or from one that forge_start seeds by trainer.seed and forge_state_dict saves."
    )
    raise AssertionError(
        f"{subject.name!r} carries something from one run into the next, so {situation.name} ends elsewhere the second "
        f"time: {difference} Make what belongs to a run in forge_start, not in __init__."
    )


def _check_resumed(subject: Subject, situation: Situation, straight: TaskModule, log: LogProbe, folder: Path) -> None:
    saved = Checkpoints(folder / "checkpoints")
    for other in saved.all():  # the plugin may save as well
        saved.remove(other)
    saved.folder.mkdir(exist_ok=True)
    (folder / SaveOnce.FOLDER / saved.path(CUT).name).rename(saved.path(CUT))
    with subject.surviving(f"{situation.name} that is resumed at update {CUT}"):
        second = LogProbe()
        resumed, _ = subject.fit(subject.make(), SaveOnce(), second, situation=situation, folder=folder)
    where = f"{situation.name.capitalize()} with {subject.name!r} that is resumed at update {CUT}"
    advice = "Return what it must remember from forge_state_dict, and take it in forge_load_state_dict."
    difference = first_difference(resumed, straight)
    assert difference is None, f"{where} ends elsewhere: {difference} {advice}"
    if not subject.make().observer:  # what it does to a run it may count anew in every life
        return
    ours, theirs = _numbers(second), _numbers(log, but=_constant(log))
    both = {key: value for key, value in theirs.items() if key in ours}
    difference = metric_difference(ours, theirs, both, lambda: _logged_again(subject, situation))
    assert difference is None, f"{where} logs something else: {difference} {advice}"


def _numbers(log: LogProbe, but: Container[str] = ()) -> dict[str, float]:
    """Every number that was logged, by its name and its update."""
    return {
        f"{name} at update {update}": value
        for update, metrics in log.metrics.items()
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and name not in but
    }


def _constant(log: LogProbe) -> set[str]:
    """Metrics that never change: what is measured once, when a run begins, may be another number when it goes on."""
    values: dict[str, list[float]] = {}
    for metrics in log.metrics.values():
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                values.setdefault(name, []).append(value)
    return {name for name, each in values.items() if len(each) > 1 and len(set(each)) == 1}


def _logged_again(subject: Subject, situation: Situation) -> dict[str, float]:
    log = LogProbe()
    subject.fit(subject.make(), SaveOnce(), log, situation=situation)
    return _numbers(log)


class SaveOnce(Plugin):
    """Saves once: the kit knows no other plugin."""

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


# ---------------------------------------------------------------------------------------------------------------------
# State


def check_state(subject: Subject) -> None:
    """What forge_state_dict gives is plain, and forge_load_state_dict takes it back."""
    plugin = subject.make()
    gives, takes = (getattr(plugin, hook, None) is not None for hook in ("forge_state_dict", "forge_load_state_dict"))
    assert gives == takes, (
        f"{subject.name!r} defines only {'forge_state_dict' if gives else 'forge_load_state_dict'}: state that is "
        "saved must be taken back, and the other way round. Define both."
    )
    if not gives:
        return
    giver, taker = StateProbe(plugin), subject.make()
    with subject.surviving("giving its state away"):
        subject.fit(plugin, giver)
    if giver.state is None:
        return
    _check_plain(giver.state, f"forge_state_dict of {subject.name!r}")
    probe = StateProbe(taker, copy.deepcopy(giver.state))
    with subject.surviving("taking its state back"):
        subject.fit(taker, probe)
    difference = _state_difference(probe.taken, giver.state, "state")
    assert not difference, (
        f"{subject.name!r} does not take back what it gave away: after forge_load_state_dict its forge_state_dict has "
        f"{difference}."
    )


class StateProbe(Plugin):
    """Inside of `plugin`: hands it a state at the start and takes its state at the end of every update."""

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
            self.taken = self._ask(trainer)

    @hookimpl
    def forge_boundary(self, trainer: Trainer) -> None:
        self.state = self._ask(trainer)

    def _ask(self, trainer: Trainer) -> dict[str, Any] | None:
        state = dict(trainer.stack.implementations("forge_state_dict"))[self.plugin.name](trainer)
        _check_plain(state, f"forge_state_dict of {self.plugin.name!r}")  # before it is copied: not everything can be
        return copy.deepcopy(state)


def _check_plain(value: Any, path: str) -> None:
    """What a checkpoint can hold without pickle: None, numbers, strings, tensors, lists, and dicts with string keys."""
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
            f"{path} is a {type(value).__name__}; a state is made of None, numbers, strings, tensors, lists and dicts."
        )


def _state_difference(actual: Any, expected: Any, path: str) -> str:
    """The first place where two states differ, in words, or ""."""
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
