"""A fit as a record of what another fit must have alike, and where two of them part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.engine.trainer import Trainer
from forge.rng import RNGState
from forge.testing.subject import Subject
from forge.twin.compare import Difference, differences, first_difference
from forge.twin.record import Record

MODES, NUMBERS, METRICS, STATE = "the modes of modules", "the random numbers", "the metrics", "the plugin's state"
CURES = {
    MODES: " Save `training` of every module, and restore it.",
    NUMBERS: " Draw from a generator of your own.",
}
GENERATORS = {
    "python": "Python's random",
    "numpy": "numpy's global generator",
    "torch": "torch's global generator",
    "device": "the device's generator",
}


class Watch(Plugin):
    """Marks what a fit has after every update, causes before effects: a dropout in another mode draws other numbers."""

    observer = True

    def __init__(self, subject: str) -> None:
        super().__init__()
        self.name, self.subject, self.record = "forge.testing.watch", subject, Record(keep=True)

    @hookimpl
    def forge_boundary(self, trainer: Trainer) -> None:
        update, numbers = trainer.progress.update, RNGState.capture(trainer.env.device).as_tree()
        modes = {path or "the task": "train" if m.training else "eval" for path, m in trainer.task.named_modules()}
        self.record.mark("", modes, update, kind=MODES)
        self.record.mark("", {GENERATORS[kind]: state for kind, state in numbers.items()}, update, kind=NUMBERS)
        self.record.mark("", trainer.task, update, kind="the weights")
        for name, state in trainer.stack.implementations("forge_state_dict"):
            if name == self.subject:  # it may hold times
                self.record.mark("", state(trainer), update, kind=STATE, aside=True)

    @hookimpl
    def forge_log(self, update: int, metrics: dict[str, Any]) -> None:
        """Metrics are aside: a plugin may have some of its own."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        self.record.mark("", numbers, update, kind=METRICS, aside=True)


def watched(subject: Subject, *plugins: Plugin, **given: Any) -> Record:
    """Fit with these plugins, and return the record of the fit."""
    watch = Watch(subject.name)
    _, result = subject.fit(*plugins, watch, **given)
    ended = {name: getattr(result, name) for name in ("updates", "epochs", "stop_reason")}
    watch.record.mark("", ended, result.updates + 1, kind="the end of the fit")
    return watch.record


def apart(ours: Record, theirs: Record, again: Callable[[], Record]) -> Difference | None:
    """Return where two fits part. What is aside counts if fits of `again` have it alike, which times are not."""
    found = first_difference(ours, theirs)
    if found is None or not found.aside:
        return found
    one, other = again(), again()
    noise = {(each.kind, each.path) for each in differences(one.marks, other.marks)}
    known = {(mark.kind, mark.path) for mark in one.marks} - noise
    ours, theirs = (record.where(lambda mark: (mark.kind, mark.path) in known) for record in (ours, theirs))
    return first_difference(ours, theirs)
