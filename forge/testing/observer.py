"""Does an observer only observe? The same fit without it must come to the same weights, counters, metrics, numbers,
with the modules in the same modes."""

from __future__ import annotations

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.engine.trainer import FitResult, Trainer
from forge.rng import RNGState
from forge.testing.metric_difference import metric_difference
from forge.testing.subject import Situation, Subject
from forge.testing.trace import digest
from forge.testing.weights import first_difference

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
    theirs, ours = SideEffectProbe(), SideEffectProbe()
    alone = subject.fit(theirs, situation=situation)
    claim = f"{subject.name!r} says observer = True, but {situation.name} ends differently with it: "
    difference = first_difference(watched[0], alone[0])
    assert difference is None, f"{claim}{difference}{_cause(subject, situation, theirs)}"
    for name in ("updates", "epochs", "stop_reason"):
        one, other = getattr(watched[1], name), getattr(alone[1], name)
        assert one == other, f"{claim}{name} is {one!r} instead of {other!r}."
    metrics = alone[1].metrics
    difference = metric_difference(
        watched[1].metrics, metrics, metrics, lambda: subject.fit(SideEffectProbe(), situation=situation)[1].metrics
    )
    assert difference is None, f"{claim}{difference}"
    if situation is subject.situation:
        subject.fit(plugin, ours, situation=situation)
        left = _left(ours, theirs)
        assert not left, f"{claim}{left}"


def _cause(subject: Subject, situation: Situation, theirs: SideEffectProbe) -> str:
    """What the plugin leaves changed in a fit of its own, as a sentence: the likely cause of other weights."""
    ours = SideEffectProbe()
    subject.fit(subject.make(), ours, situation=situation)
    left = _left(ours, theirs)
    return f" {left[0].upper()}{left[1:]}" if left else ""


def _left(ours: SideEffectProbe, theirs: SideEffectProbe) -> str:
    """What differs; modes before generators, because a dropout in another mode draws other numbers."""
    for update, modes in theirs.modes.items():
        apart = [path for path, training in ours.modes.get(update, modes).items() if training != modes.get(path)]
        if apart:
            mode = "train" if ours.modes[update][apart[0]] else "eval"
            return (
                f"it leaves {apart[0] or 'the task'} in {mode} mode. Note `training` of every module, and put it back."
            )
    kinds = [GENERATORS[kind] for kind in theirs.state if ours.state.get(kind) != theirs.state[kind]]
    return f"it draws from {' and '.join(kinds)}. Draw from a generator of your own." if kinds else ""


class SideEffectProbe(Plugin):
    """The mode of every module after each update, and how far every generator was at the end of the last one."""

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self.name, self.state = "forge.testing.side_effects", dict[str, str]()
        self.modes: dict[int, dict[str, bool]] = {}

    @hookimpl
    def forge_boundary(self, trainer: Trainer) -> None:
        modules = trainer.task.named_modules()
        self.modes[trainer.progress.update] = {path: module.training for path, module in modules}
        if trainer.progress.update == trainer.max_updates:
            tree = RNGState.capture(trainer.env.device).as_tree()
            self.state = {kind: digest(state) for kind, state in tree.items()}
