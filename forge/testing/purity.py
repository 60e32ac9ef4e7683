"""Does an observer only observe? The same fit without it must come to the same weights, counters, metrics, numbers."""

from __future__ import annotations

from forge.hooks import hookimpl
from forge.plugin import Plugin
from forge.seeding import RNGState
from forge.task import TaskModule
from forge.testing.steady import metric_difference
from forge.testing.subject import Situation, Subject
from forge.testing.trace import digest
from forge.testing.weights import first_difference
from forge.trainer import FitResult, Trainer

GENERATORS = {
    "python": "Python's random",
    "numpy": "numpy's global generator",
    "torch": "torch's global generator",
    "device": "the device's generator",
}


def check_observer(
    subject: Subject, situation: Situation, plugin: Plugin, watched: tuple[TaskModule, FitResult]
) -> None:
    """Compare a fit that the plugin has watched with one that nobody has."""
    theirs, ours = Numbers(), Numbers()
    alone = subject.fit(theirs, situation=situation)
    claim = f"{subject.name!r} says observer = True, but {situation.name} ends differently with it: "
    difference = first_difference(watched[0], alone[0])
    assert difference is None, f"{claim}{difference}{_drawn(subject, situation, theirs)}"
    for name in ("updates", "epochs", "stop_reason"):
        one, other = getattr(watched[1], name), getattr(alone[1], name)
        assert one == other, f"{claim}{name} is {one!r} instead of {other!r}."
    metrics = alone[1].metrics
    difference = metric_difference(
        watched[1].metrics, metrics, metrics, lambda: subject.fit(Numbers(), situation=situation)[1].metrics
    )
    assert difference is None, f"{claim}{difference}"
    if situation is subject.situation:
        subject.fit(plugin, ours, situation=situation)
        assert ours.state == theirs.state, f"{claim}{_who_drew(ours, theirs)}"


def _drawn(subject: Subject, situation: Situation, theirs: Numbers) -> str:
    """The likely cause, where the plugin draws random numbers."""
    ours = Numbers()
    subject.fit(subject.make(), ours, situation=situation)
    return f" {_who_drew(ours, theirs).capitalize()}" if ours.state != theirs.state else ""


def _who_drew(ours: Numbers, theirs: Numbers) -> str:
    kinds = [GENERATORS[kind] for kind in theirs.state if ours.state.get(kind) != theirs.state[kind]]
    return f"it draws from {' and '.join(kinds)}. Draw from a generator of your own."


class Numbers(Plugin):
    """How far every generator was at the end of the last update."""

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self.name, self.state = "forge.testing.numbers", dict[str, str]()

    @hookimpl
    def forge_boundary(self, trainer: Trainer) -> None:
        if trainer.progress.update == trainer.max_updates:
            tree = RNGState.capture(trainer.env.device).as_tree()
            self.state = {kind: digest(state) for kind, state in tree.items()}
