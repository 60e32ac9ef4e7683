"""doctor: run every probe on copies of a task and its data, and report what is wrong, with evidence and a cure.

::

    report = forge.doctor(MyTask(), train, val)
    print(report)
    assert not report.errors
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forge import registry
from forge.config.recipe import as_recipe
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.data.adapt import by_name
from forge.data.splits import live_loaders
from forge.engine.trainer import Plugins, Trainer
from forge.errors import ForgeError
from forge.snapshot.left_out import is_left_out
from forge_doctor.deadline import Deadline
from forge_doctor.experiments import motion
from forge_doctor.facts import facts_of
from forge_doctor.findings import LEVELS, Finding
from forge_doctor.memory import Growth, KeptGraphs
from forge_doctor.patient import (
    NotApplicable,
    OutOfTime,
    Patient,
    copied,
    copied_task,
    each,
    loss_of,
    no_trace,
    rows,
)
from forge_doctor.probe_order import AFTER, BEFORE, LAST, offered
from forge_doctor.probes import serving, start
from forge_doctor.report import DoctorReport
from forge_doctor.stored import kept
from forge_doctor.unsaved import fingerprint_hidden, is_a_librarys, matters

UPDATES = 12
"""Updates of the short run."""
SAMPLES = 3000
"""Samples of each split that are looked at."""
BATCHES = 4
"""Batches of train that the graph is looked at on."""
READ, HALF, ALL = 0.1, 0.5, 1.0
"""Shares of the time that is left: for reading a split; for each part (the first probes, the short run, those after it)
and for the steps of a probe of its part; for the last, which trains copies."""
NO_TIME = "there was no time for it"
STEPS = 4500
"""Forward passes of an examination, about: where they would take longer than there is time, they get fewer samples."""
LOOKS = (3, 6, 9)
"""Updates after which what the task holds is looked through, and the graph of the next one is marked."""
SETTLED = 3
"""Updates after which new attributes are watched too."""
NOT_REPEATED = {"unseeded"}
"""What a fit warns of and the doctor does not repeat: here the task is made by others, and the seed is the doctor's."""


def doctor(
    task: TaskModule,
    train: Any,
    val: Any = None,
    *,
    plugins: Plugins = (),
    tell: Callable[[str], None] = lambda what: None,
    deadline: Deadline | None = None,
    report: DoctorReport | None = None,
    **trainer: Any,
) -> DoctorReport:
    """Examine a task and its data, and return a report; the task, the data and all generators stay as they are.

    `plugins` and other arguments of `forge.Trainer` (`recipe`, `max_epochs`, `device`) describe the planned run;
    without a length it is 10 epochs. `deadline`, `forge_doctor.Deadline(seconds)`, ends the examination in time: what
    is left out is listed. `tell` is called with the name of each part. `report` is filled, if one is given, so that it
    holds what was found until a signal.
    """
    report, deadline = report or DoctorReport(), deadline or Deadline()
    for loader in live_loaders(each({"train": train, "val": val})):
        loader.attach(task)
    recipe = trainer.get("recipe")
    plan = {**(as_recipe(recipe).trainer if recipe is not None else {}), **trainer}
    settings = {"seed": 0, "log_every": 10_000, **trainer, "validate_every": None, "run_dir": False, "resume": None}
    if not plan.get("max_epochs") and not plan.get("max_updates"):
        settings["max_epochs"] = 10
    with no_trace(torch.device("cpu")), kept(*each({"train": train, "val": val}).values()):
        examination = Examination(report, train, val, tell, deadline)
        examination.original = task
        examination.validate_every = plan.get("validate_every")
        try:
            _run(examination, copied_task(task), plugins, settings)
            if examination.patient is not None and not report.skipped.get("the run"):
                examination.probe(LAST, ALL)
        finally:
            _sort(report, task.expected)
            report.seconds = deadline.spent
            if NO_TIME in report.skipped.values():
                report.partial = "the time was over"
    return report


def _run(examination: Examination, task: TaskModule, plugins: Plugins, settings: Any) -> None:
    """A short run of the user's own stack, with the examination in it."""
    report = examination.report
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _fit(examination, task, plugins, settings)
    known = {finding.name for finding in report.findings} | NOT_REPEATED
    for item in said:
        name, text = getattr(item.message, "finding", ""), str(item.message)
        if name and name not in known and not text.endswith(f"[{name}]"):  # the probes of a first look have run
            known.add(name)
            found = Finding(name, text)  # what a fit warns of by values alone is a warning at most
            report.findings.append(replace(found, level="warning") if found.level == "error" else found)


def _fit(examination: Examination, task: TaskModule, plugins: Plugins, settings: Any) -> None:
    report, (train, val) = examination.report, examination.given
    try:
        trainer = Trainer(plugins=plugins if "recipe" not in settings else plugins or None, **settings)
        examination.plugins = list(trainer.stack)
        for plugin in [plugin for plugin in trainer.stack if is_left_out(plugin)]:
            trainer.stack.remove(plugin.name)
        trainer.stack.add(examination)
        trainer.fit(task, train, val)
    except ForgeError as error:
        report.skipped["the run"] = str(error).splitlines()[0]
        named = getattr(error, "finding", "") or "refused"
        if not any(finding.name == named for finding in report.findings):
            report.findings.append(Finding(named, str(error), level="error"))
    except Exception as error:
        report.skipped["the run"] = f"{type(error).__name__}: {error}"
        report.findings.append(Finding("refused", f"Training ends in {type(error).__name__}: {error}"))


class Examination(Plugin):
    """Runs the probes inside a short run, which has the device, the optimizers and the plan."""

    def __init__(self, report: DoctorReport, train: Any, val: Any, tell: Any, deadline: Deadline | None = None):
        super().__init__()
        self.deadline = deadline or Deadline()
        self.name = "forge_doctor.examination"
        self.first_probes = BEFORE | {
            label: functools.partial(registry.call, "probe", entry.name, of=Finding)
            for label, entry in offered().items()
        }
        self.last_probes, self.updates = AFTER, UPDATES
        self.report, self.tell = report, tell
        self.given = by_name(train, "train"), by_name(val, "val")  # as the Trainer serves them
        if isinstance(self.given[1], dict) and len(self.given[1]) > 1:
            others = f"val {', '.join(list(self.given[1])[1:])}"
            report.skipped[others] = "experiments take the first of several loaders"
        self.original: TaskModule | None = None
        self.validate_every: str | None = None
        "Of the planned run; this one does not validate."
        self.patient: Patient | None = None
        self.plugins: list[Plugin] = []
        self._weights: dict[str, Tensor] = {}
        self._hidden: dict[str, str] = {}
        self._growth, self._kept = Growth(), KeptGraphs()
        self._run_ends = self.deadline

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        self._hidden = fingerprint_hidden(trainer)
        with suppress(Exception):  # before anything is read: reading itself may change the data
            self.report.findings.extend(serving.changed(each(dict(zip(("train", "val"), self.given, strict=True)))))
        self.patient = admitted(trainer, *self.given, self.deadline)
        self.patient.plugins = self.plugins or list(trainer.stack)
        self.patient.original, self.patient.validate_every = self.original, self.validate_every
        with no_trace(trainer.env.device):
            with suppress(Exception):  # many probes share the first step; its error is theirs to say
                _ = self.patient.watched
                self.patient.run(self.patient.clone(), self.patient.batches[0])  # not the first, which prepares others
                self.patient.lighten(self.deadline.left / STEPS / max(self.patient.cost, 1e-9))
            self.probe(self.first_probes)
        self._run_ends = self.deadline.part(HALF)
        self._weights = copied(self.patient.task)
        self.patient.track = motion.Track()
        self.patient.track.note(trainer.task)

    def probe(self, probes: dict[str, Callable[[Patient], Iterator[Finding]]], share: float = HALF) -> None:
        """Run probes in their order, within a share of the time that is left; the steps of each take this share of the
        rest at most, and where nothing is left, others run that need no step."""
        patient, within = self.patient, self.deadline.part(share)
        assert patient is not None
        for number, (what, probe) in enumerate(probes.items(), 1):
            if self.deadline.is_over or patient.is_stopped:
                self.report.skipped[what] = NO_TIME
                continue
            self.tell(f"{what} ({number} of {len(probes)})")
            patient.begin(within.part(share))
            self._probe(what, probe)
        patient.begin(Deadline())

    def _probe(self, what: str, probe: Callable[[Patient], Iterator[Finding]]) -> None:
        """Run a probe, and note what came of it."""
        patient, report = self.patient, self.report
        assert patient is not None
        before = len(report.findings)
        try:
            report.findings.extend(probe(patient))
        except NotApplicable:
            return
        except OutOfTime:
            pass
        except Exception as error:
            why = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"[:200]
            refused = f"{patient.place(patient.asked)} does not take the batch of this experiment: "
            report.skipped[what] = (refused if error is patient.refused else "") + why.partition("\n")[0]
        else:
            if len(report.findings) == before and not patient.is_late:
                report.good.append(what)
        if patient.is_late:  # some probes take an error for an answer
            report.skipped[what] = NO_TIME

    @hookimpl
    def forge_step_end(self, step: Any) -> None:
        patient = self.patient
        assert patient is not None
        patient.track.note(patient.task)
        now = copied(patient.task)
        patient.note_motion(self._weights, now)
        self._weights = now
        patient.updates = step.index + 1
        if patient.updates == SETTLED:  # what is made at its first use counts from then on
            self._hidden = fingerprint_hidden(step.trainer) | self._hidden
        if patient.updates in LOOKS:
            self._growth.look(step.trainer)
        if patient.updates >= self.updates or self._run_ends.is_over:
            step.trainer.max_updates = patient.updates

    @hookimpl
    def forge_inspect_grads(self, step: Any) -> None:
        if self.patient is not None and self.patient.track is not None:
            named, track = step.trainer.task.named_parameters(), self.patient.track
            have = {name for name, p in named if p.grad is not None and bool(p.grad.any())}
            track.with_gradient = have if not self.patient.updates else track.with_gradient & have
        if self.patient is not None and any(plugin.name == "clip" for plugin in step.trainer.stack):
            gradients = [p.grad for p in step.parameters() if p.grad is not None]
            self.patient.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    @hookimpl(wrapper=True)
    def forge_forward(self, step: Any, batch: Any) -> Any:
        output = yield
        if step.stage == "train" and self.patient is not None:
            found = loss_of(output)
            if isinstance(found, Tensor) and found.numel() == 1:
                self.patient.losses.append(float(found.detach()))
                if self.patient.updates in LOOKS:
                    self._kept.put(found)
        return output

    @hookimpl
    def forge_end(self, trainer: Trainer) -> None:
        patient = self.patient
        if patient is None or not patient.updates:
            return
        with no_trace(trainer.env.device):
            with suppress(Exception):  # a step that cannot run again is named elsewhere
                self.report.facts = facts_of(trainer, patient)
            self.probe(self.last_probes)
        for what in (self._kept.found, self._growth.found):
            self.report.findings.extend(what())
        now = fingerprint_hidden(trainer)
        paths = {path.partition("[")[0] for path, value in self._hidden.items() if now.get(path, value) != value}
        changed = [path for path in sorted(paths) if path.startswith("task") and not is_a_librarys(trainer, path)]
        with no_trace(trainer.env.device):
            patient.begin(Deadline())
            if changed and matters(patient):
                text = (
                    f"{', '.join(changed[:4])} changes during training and is in no checkpoint: a resumed run begins "
                    "with its first value, and a step says something else with it."
                )
                self.report.findings.append(Finding("state_not_saved", text, changed[0], {"attributes": changed[:8]}))


def admitted(trainer: Trainer, train: Any, val: Any, deadline: Deadline | None = None) -> Patient:
    """Read the first batches and samples, on the run's device; of slow loaders as many as there is time for."""
    deadline, move = deadline or Deadline(), trainer.env.move
    patient = Patient(trainer.task, trainer, train, val, [], [])
    patient.begin(deadline)
    served, patient.samples = _served(train, deadline.part(READ))
    val_served, patient.val_samples = _served(patient.loaders["val"], deadline.part(READ))
    patient.batches, patient.val_batches = move(served), move(val_served[:2])
    patient.headroom = start.headroom(trainer)
    return patient


def _served(loader: Any, within: Deadline) -> tuple[list[Any], list[tuple[Tensor, ...]]]:
    """The first batches, and their samples one by one."""
    if loader is None:
        return [], []
    kept: list[Any] = []
    samples: list[tuple[Tensor, ...]] = []
    for batch in loader:
        fresh = [] if any(batch is other for other in kept) else rows(batch)  # a list may hold one batch often
        if len(kept) < BATCHES:
            kept.append(batch)
        samples.extend(fresh)
        is_enough = len(kept) >= BATCHES and (not fresh or within.is_over)
        if len(samples) >= SAMPLES or is_enough:
            break
    return kept, samples[:SAMPLES]


def _sort(report: DoctorReport, expected: Any) -> None:
    """Order findings by level, each name and place once, and set those apart that are meant.

    A step as a whole is named only where no line of it is.
    """
    seen: set[tuple[str, str]] = set()
    lines = {(f.name, f.level) for f in report.findings if f.where and not f.where.endswith("_step")}
    least = [f for f in report.findings if not f.where.endswith("_step") or (f.name, f.level) not in lines]
    ordered = sorted(least, key=lambda finding: LEVELS.index(finding.level))
    unique = [f for f in ordered if (f.name, f.where) not in seen and not seen.add((f.name, f.where))]
    report.silenced = [finding for finding in unique if finding.name in expected]
    report.findings = [finding for finding in unique if finding.name not in expected]
