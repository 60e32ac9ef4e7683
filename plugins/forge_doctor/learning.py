"""Learning: train on one batch again and again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.data.accumulation_windows import batch_size
from forge.data.adapt import by_name
from forge.engine.trainer import Plugins, Trainer
from forge.runs.wording import counted
from forge.torch_internals import writes
from forge_doctor.deadline import Deadline
from forge_doctor.experiments import influence, motion
from forge_doctor.experiments.answers import answers
from forge_doctor.experiments.intervene import says
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, copied, first, no_trace, parameters
from forge_doctor.patient import named as listed
from forge_doctor.report import Curve, DoctorReport
from forge_doctor.trial import Trial, Variation

UPDATES = 200
"""Updates on one batch, at most."""
NO_TIME = "there was no time for it"
LEARNT, DONE = 0.1, 0.005
"""The share of the way to the floor that may be left of a batch that is learnt, and at which a trial ends."""
STILL, HALF = 0.03, 0.5
"""The shares of the way to the floor below which nothing was learnt, and too little for what a batch leaves open."""
FALLING, FELL = 0.02, 0.3
"""The share of what is left that a fifth of the updates must take away to count as falling; and that of the loss which
they must at a rate that is not too low."""
SETTLES, FLAT = 120, 60
"""Updates after which a trial may end, and those that must then have been flat."""
USUAL = 1e-2
"""The share of its size by which an update usually moves a matrix."""
FEW = 4
"""Samples of the smaller batch that is tried."""


QUIET = Variation("evaluation mode, without dropout and batch statistics", evaluates=True)
FEWER = Variation(f"{FEW} samples", samples=FEW)
SPECIAL = (Variation("no weight decay", decays=False), Variation("no clipping of gradients", edits=False))
"""What is tried first with a batch that is not learnt: it may hide behind the rate."""
CHANGES = (
    Variation("10 times the learning rate", rate=10.0),
    Variation("a tenth of the learning rate", rate=0.1),
    QUIET,
    FEWER,
)
"""What is tried then, one at a time."""


def one_batch(
    task: TaskModule,
    train: Any,
    *,
    plugins: Plugins = (),
    settings: dict[str, Any] | None = None,
    updates: int = UPDATES,
    deadline: Deadline | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> Curve:
    """Train copies of a task on the first batch of `train` again and again, and judge how far its loss falls.

    It runs with the planned stack, without schedules, and draws the same random numbers in every update: dropout,
    noise and masks are part of the one batch. `settings` are arguments of a Trainer. What the loss reaches is compared
    with its start, with chance (one answer for all samples) and with its floor (any answers). Where it stops
    far from there, one thing at a time is changed, to see which of them is the cause.
    """
    settings = {"seed": 0, "log_every": 10_000, **(settings or {})}
    settings |= {"validate_every": None, "run_dir": False, "resume": None}
    with no_trace(torch.device("cpu")):
        (batch,) = first(by_name(train, "train"), 1)
        return OneBatch(task, batch, plugins, settings, updates, deadline or Deadline(), tell).curve()


class OneBatch:
    """The trials of one batch."""

    def __init__(
        self,
        task: TaskModule,
        batch: Any,
        plugins: Plugins,
        settings: dict[str, Any],
        updates: int,
        deadline: Deadline,
        tell: Callable[[str], None],
    ):
        self.task, self.updates, self.deadline, self.tell = task, updates, deadline, tell
        self.witness = TrialLook(batch, deadline.part(0.3))
        self.trial = Trial(plugins, settings, batch, (self.witness,))
        self.found = Curve([])
        self.trained: TaskModule | None = None

    def curve(self) -> Curve:
        found, deadline = self.found, self.deadline
        self.tell("one batch: learning it")
        within = deadline.part(0.5)
        trained = self.trained = copy.deepcopy(self.task)
        ended = [False]

        def is_over(losses: list[float]) -> bool:
            ended[0] = self._is_settled(losses)
            return ended[0] or within.is_over

        found.losses = self.trial.fit(trained, self.updates, is_over=is_over)
        found.is_cut_short = not ended[0] and len(found.losses) < self.updates
        found.reached = reached(found.losses)
        floor = self.witness.floor
        if floor is not None and min(found.losses) < floor - DONE * abs(found.start - floor):
            self.witness.floor = None  # a target that moves with the weights, or what is random in it
        found.floor = self.witness.floor
        found.chance = self.witness.chance if found.floor is not None else None
        self._judge(trained)
        return found

    def _is_settled(self, losses: list[float]) -> bool:
        """Whether a trial can end: the batch is learnt, or the loss has long been flat."""
        floor = self.witness.floor if self.witness.floor is not None else 0.0
        way = losses[0] - floor
        if min(losses) >= floor - DONE * abs(way) and max(losses[-3:]) - floor <= DONE * way:
            return True
        late = len(losses) >= SETTLES
        return late and min(losses[-FLAT:]) > min(losses[:-FLAT]) - 0.002 * abs(way)

    def _judge(self, trained: TaskModule) -> None:
        found = self.found
        done = counted(len(found.losses), "update")
        text = f"{done} on one batch take its loss from {found.start:.4g} to {found.reached:.4g}"
        known = [f"chance is {found.chance:.4g}"] if found.chance is not None else []
        floor = 0.0 if found.floor is not None and abs(found.floor) < 1e-3 * abs(found.start) else found.floor
        known += [f"the floor {floor:.3g}"] if floor is not None else []
        text += f" ({', '.join(known)})" if known else ""
        if not math.isfinite(found.reached):
            found.level = "note" if self._is_learnt(min(x for x in found.losses if x == x)) else "warning"
            self._try_changes()
            found.verdict = f"{text}.{self._cause()}"
            return
        found.is_learnt = self._is_learnt(found.reached)
        if found.is_learnt and found.floor is None and min(found.losses) < 0:
            found.is_learnt = False
            found.verdict = f"{text}. It falls below zero, and nothing says how far it can."
        elif found.is_learnt and found.chance is not None and found.chance - self._lowest() <= DONE * abs(found.start):
            found.verdict = f"{text}: it is at its floor, and one answer for all samples is there too."
        elif found.is_learnt:
            found.verdict = f"{text}: it is learnt."
        elif len(self.witness.names) > 1:
            found.verdict = f"{text}. Several optimizers train against each other's losses: no level is right or wrong."
        elif found.is_cut_short:
            found.verdict = f"{text}. There was no time for more."
        elif self._is_falling():
            found.verdict = f"{text}, and it is still falling."
        else:
            self._try_changes()
            self._name_cause(text, trained)

    def _name_cause(self, text: str, trained: TaskModule) -> None:
        """Say what a loss that stopped far from its floor comes from. Only what is no one's noise is a warning."""
        found = self.found
        share = self._share(found.reached)
        reads = found.chance is not None and found.reached < (1 - LEARNT) * found.chance
        if not all(map(self.witness.descends, (trained, copy.deepcopy(self.task)))):
            found.verdict = (
                f"{text}, and stays there. It does not fall along its own gradient (one that is reversed, stopped, or "
                "of a reward): its level says little."
            )
        elif found.floor is None and min([*found.losses, *found.tried.values()]) < 0:
            found.verdict = f"{text}. It can fall below zero, and nothing says how far."
        elif found.cause == FEWER.name and share > STILL:
            found.verdict = f"{text}. {FEW} samples of it are learnt: all of them need more updates, or a larger model."
        elif found.cause == QUIET.name and (share > STILL or reads):
            found.verdict = f"{text}. With {QUIET.name} it comes to {found.tried[QUIET.name]:.4g}."
        elif found.cause and found.cause != FEWER.name:
            found.level = "warning" if share < HALF else "note"
            found.verdict = f"{text}, and stays there.{self._cause()}"
        else:
            is_low = not reads and share < (HALF if found.floor is not None else STILL)
            found.level = "warning" if is_low else "note" if found.floor is not None else ""
            few = f"; {FEW} samples of it are learnt" if found.cause else ""
            found.cause, found.verdict = "", f"{text}, and stays there. No one change was found that helps{few}."

    def _cause(self) -> str:
        cause = self.found.cause
        return f" With {cause} it comes to {self.found.tried[cause]:.4g}: that is the cause." if cause else ""

    def _lowest(self) -> float:
        """The floor, or 0 where it is unknown and no loss is below."""
        return self.found.floor if self.found.floor is not None else min(0.0, *self.found.losses)

    def _share(self, loss: float) -> float:
        """The share of the way to the floor that a loss has gone, from the start or from chance."""
        found, floor = self.found, self._lowest()
        base = found.start
        if found.chance is not None and found.chance - floor > DONE * (found.start - floor):
            base = min(base, found.chance)  # else one answer for all is as good as the right ones
        return 1.0 if base - floor <= 1e-12 else (base - loss) / (base - floor)

    def _is_learnt(self, loss: float) -> bool:
        return math.isfinite(loss) and self._share(loss) >= 1 - LEARNT

    def _is_falling(self) -> bool:
        losses = self.found.losses
        width = max(1, len(losses) // 5)
        fall = median(losses[-2 * width : -width] or losses[:1]) - median(losses[-width:])
        fallen = losses[0] - self.found.reached > STILL * (losses[0] - self._lowest())
        return fallen and fall > FALLING * (self.found.reached - self._lowest())

    def _try_changes(self) -> None:
        """Try one change at a time, until the batch is learnt, and note the one that helps."""
        found = self.found
        all_changes = (*SPECIAL, *self.witness.fitted(), *CHANGES)
        tried = [change for change in all_changes if self._differs(change)]
        self.witness.looks = False
        for number, change in enumerate(tried):
            if self.deadline.is_over:
                break
            self.tell(f"one batch: with {change.name}")
            within = self.deadline.part(1 / (len(tried) - number))
            try:
                losses = self.trial.fit(
                    copy.deepcopy(self.task),
                    self.updates // 2,
                    change,
                    lambda losses, within=within: within.is_over or self._is_settled(losses),
                )
            except Exception:  # a step that takes no smaller batch, or not in evaluation mode
                continue
            came = found.tried[change.name] = reached(losses)
            left = (found.reached if math.isfinite(found.reached) else found.start) - self._lowest()
            if self._is_learnt(came) or (change is not FEWER and came - self._lowest() < 0.5 * left):
                found.cause = change.name
                return

    def _differs(self, change: Variation) -> bool:
        """Whether a change changes anything here."""
        witness = self.witness
        if not change.decays:
            return witness.decays
        if not change.edits:
            return witness.edits
        if change.evaluates:
            return witness.has_modes
        if change.samples is not None:
            return (batch_size(self.trial.batch) or 0) > change.samples
        return True


class TrialLook(Plugin):
    """Looks at the first trial from inside: its floor, its optimizers and its stack."""

    def __init__(self, batch: Any, within: Deadline):
        super().__init__()
        self.name = "forge_doctor.one_batch"
        self.batch, self.looks, self._within = batch, True, within
        self.trainer: Trainer | None = None
        self.names: list[str | None] = []
        self.floor: float | None = None
        self.chance: float | None = None
        self.decays = self.edits = False
        self.moved = 0.0
        "By which share of their size the first update moved the matrices, half of them by more."
        self._before: dict[str, Tensor] = {}
        self.has_modes = True
        "Whether the task's loss is another in evaluation mode."
        self._versions: dict[str, int] = {}
        "Of the weights that the last update moved, after it."
        self.overwritten: tuple[int, list[str], str] | None = None
        "The first update whose step wrote to trained weights, which, and the weight that they were copied from."

    @hookimpl(wrapper=True)
    def forge_forward(self, step: Any) -> Any:
        output = yield
        self._compare(step)
        return output

    @hookimpl(wrapper=True)
    def forge_optimizer_step(self, step: Any) -> Any:
        """See whether anything but an optimizer has written to weights that one trains."""
        self._compare(step)
        before = {name: writes(p) for name, p in step.trainer.task.named_parameters()}
        result = yield
        now = {name: writes(p) for name, p in step.trainer.task.named_parameters()}
        self._versions = {name: version for name, version in now.items() if version != before.get(name)}
        return result

    def _compare(self, step: Any) -> None:
        weights = dict(step.trainer.task.named_parameters())
        written = [name for name, version in self._versions.items() if writes(weights[name]) != version]
        if written and self.overwritten is None and self.names == [None]:
            others = [(name, p) for name, p in weights.items() if name not in self._versions]
            source = next((name for name, p in others if torch.equal(p, weights[written[0]])), "")
            self.overwritten = (step.index, written, source)

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        self._versions = {}
        if not self.looks:
            return
        self.looks, self.trainer = False, trainer
        self._before = copied(trainer.task)
        self.batch = trainer.env.move(self.batch)
        patient = Patient(trainer.task, trainer, None, None, [self.batch], [], within=self._within)
        self.names = patient.names
        groups = [group for entry in trainer.optimizers.entries.values() for group in entry.optimizer.param_groups]
        self.decays = any(group.get("weight_decay") for group in groups)
        self.edits = any(getattr(plugin, "forge_edit_grads", None) is not None for plugin in trainer.stack)
        with no_trace(trainer.env.device), suppress(Exception):  # a step that does not run on free answers
            self.floor, self.chance = levels(patient, self.batch)
            modes = [says(patient, self.batch, "train", training=training).get("loss") for training in (True, False)]
            self.has_modes = modes[0] != modes[1]

    @hookimpl
    def forge_step_end(self, step: Any) -> None:
        if self._before:
            now, before = copied(step.trainer.task), self._before
            sizes = {name: float(x.norm()) for name, x in before.items() if x.ndim > 1}
            self.moved = median([float((now[name] - before[name]).norm()) / n for name, n in sizes.items() if n] or [0])
            self._before = {}

    def fitted(self) -> list[Variation]:
        """The rate at which an update moves matrices by a usual share of their size, where that is far from here."""
        factor = USUAL / self.moved if self.moved > 0 else 1.0
        return [Variation(f"{factor:.1g} times the learning rate", rate=factor)] if not 0.03 < factor < 30 else []

    def descends(self, task: TaskModule) -> bool:
        """Whether the gradient is the slope of the loss.

        It is not where gradients are reversed or stopped on purpose, or where the loss stands for something else, as
        in reinforcement learning; then its level says nothing.
        """
        assert self.trainer is not None
        task = task.to(self.trainer.env.device).train()
        patient = Patient(task, self.trainer, None, None, [self.batch], [])
        found = influence.slopes(patient, None, set(parameters(task))) if len(self.names) == 1 else None
        return found is None or all(group.agrees for group in found[0])


def levels(patient: Patient, batch: Any) -> tuple[float | None, float | None]:
    """The lowest loss of any answers, and of one answer for all samples; None where they cannot be chosen freely, or
    nothing bounds the loss."""
    held = answers(patient, batch) if len(patient.names) == 1 else None
    if held is None:
        return None, None
    lowest, best = held.best()
    ahead = [[x + far * (x - y) for x, y in zip(best, held.values, strict=True)] for far in (1, 3, 10)]
    lowest = min(lowest, *map(held.value_at, ahead))  # an end that lies far away is looked up on the way there
    if not 0 <= lowest < math.inf:  # a likelihood has none
        return None, None
    constant = held.best(constant=True)[0]
    return lowest, constant if math.isfinite(constant) and any(x.ndim and len(x) > 1 for x in held.values) else None


def reached(losses: list[float]) -> float:
    """The loss that updates came to: the median of the last."""
    if not losses or not math.isfinite(losses[-1]):
        return math.nan
    return median(losses[-max(3, len(losses) // 20) :])


def learn(
    patient: Patient,
    make: Callable[[], TaskModule],
    plugins: Plugins,
    settings: dict[str, Any],
    updates: int,
    report: DoctorReport,
    deadline: Deadline | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> None:
    """Draw the curve of one batch; then see what validation says of the batch that was learnt."""
    what, deadline, before = "learning one batch", deadline or Deadline(), len(report.findings)
    if deadline.is_over:
        report.skipped[what] = NO_TIME
        return
    try:
        (batch,) = patient.batches[:1] if patient.whole else first(patient.train, 1)
        trials = OneBatch(given := make(), batch, plugins, settings, updates, deadline.part(0.75), tell)
        curve = report.one_batch = trials.curve()
    except Exception as error:
        report.skipped[what] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return
    if curve.level:
        figures = {"start": curve.start, "reached": curve.reached, "chance": curve.chance, "floor": curve.floor}
        evidence = {key: value for key, value in figures.items() if value is not None}
        found = Finding("cannot_learn_a_batch", curve.verdict, type(patient.task).__name__, {**evidence, **curve.tried})
        report.findings.append(replace(found, level=curve.level))
    if trials.witness.overwritten is not None:
        report.findings.append(_overwritten(*trials.witness.overwritten))
    if trials.trained is not None:
        falls = curve.start - curve.reached > FELL * abs(curve.start)
        held = (curve.is_learnt, falls, given, trials.trained)
        report.findings[:] = [found for found in report.findings if not motion.is_denied(found, *held)]
    if trials.trained is not None and not curve.is_cut_short:
        learnt = motion.learnt(patient, trials.trained, trials.witness.batch, curve.start, curve.reached)
        report.findings.extend(learnt)
    if curve.is_cut_short and not curve.is_learnt:
        report.skipped[what] = NO_TIME
    elif len(report.findings) == before:
        report.good.append(what)


def _overwritten(update: int, names: list[str], source: str) -> Finding:
    text = f"Before update {update + 1} on one batch, something beside the optimizer writes to "
    text += f"{counted(len(names), 'weight')} that it trains, {listed(names)}"
    text += f"; {names[0]} is {source} then, which no optimizer trains: what was learnt is gone." if source else "."
    return Finding("weights_overwritten", text, names[0], level="warning" if source else "note")
