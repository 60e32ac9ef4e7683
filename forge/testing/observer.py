"""Check of `observer = True`: the same fit without the plugin must have the same weights, counters, metrics, random
numbers and modes of modules."""

from __future__ import annotations

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.engine.trainer import FitResult, Trainer
from forge.rng import RNGState
from forge.snapshot.evidence import digest
from forge.testing.metric_difference import metric_difference
from forge.testing.subject import Situation, Subject
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
    """Compare a fit that the plugin observed with one without it."""
    theirs, ours = SideEffectProbe(), SideEffectProbe()
    alone = subject.fit(theirs, situation=situation)
    claim = f"{subject.name!r} declares observer = True, but {situation.name} ends differently with it: "
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
        effect = _side_effect(ours, theirs)
        assert not effect, f"{claim}{effect}"


def _cause(subject: Subject, situation: Situation, theirs: SideEffectProbe) -> str:
    """Describe a side effect of the plugin in a fit of its own, the likely cause of other weights."""
    ours = SideEffectProbe()
    subject.fit(subject.make(), ours, situation=situation)
    effect = _side_effect(ours, theirs)
    return f" {effect[0].upper()}{effect[1:]}" if effect else ""


def _side_effect(ours: SideEffectProbe, theirs: SideEffectProbe) -> str:
    """Describe a difference; modes before generators, because a dropout in another mode draws other numbers."""
    for update, modes in theirs.modes.items():
        changed = [path for path, training in ours.modes.get(update, modes).items() if training != modes.get(path)]
        if changed:
            mode = "train" if ours.modes[update][changed[0]] else "eval"
            return (
                f"it leaves {changed[0] or 'the task'} in {mode} mode. Save `training` of every module, and restore it."
            )
    kinds = [GENERATORS[kind] for kind in theirs.state if ours.state.get(kind) != theirs.state[kind]]
    return f"it draws from {' and '.join(kinds)}. Draw from a generator of your own." if kinds else ""


class SideEffectProbe(Plugin):
    """Records the mode of every module after each update, and the state of every generator after the last one."""

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
