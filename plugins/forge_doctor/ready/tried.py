"""Steps that try what must work: the doctor, one batch, every stage, save and load, resume; and what the stack has."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from forge.checkpoint import Checkpoints
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin, plugin_options
from forge.engine.trainer import Trainer
from forge.report.svg import line_chart
from forge.runs.folder import RunFolder
from forge.runs.wording import counted
from forge.util.text import format_bytes
from forge_doctor.deadline import Deadline
from forge_doctor.doctor import doctor
from forge_doctor.readiness import readiness
from forge_doctor.ready.planned_run import NotAffordable, PlannedRun
from forge_doctor.ready.report import RoadStep
from forge_plugins import Checkpoint, Rehearse

CURVE = "cannot_learn_a_batch", "learning one batch"
"""The doctor's finding and part that are the third step."""
NAMED = 5
"""Checks that are named of those that could not be made for one reason."""
SAVED, STOPPED = 4, 8
"""The update of the checkpoint that is rehearsed, and the last one."""


def examine(run: PlannedRun, step: RoadStep) -> None:
    """The doctor: errors end the road. It learns one batch too, which the next step shows."""
    report, own = run.examined, {key: run.settings[key] for key in run.settings.keys() - {"run_dir", "resume"}}
    within = Deadline(0.9 * (run.until - time.monotonic()))
    given = run.plugins if run.plugins is not None else ()
    try:
        doctor(run.task, run.train, run.loaders["val"], plugins=given, deadline=within, report=report, **own)
    finally:  # what was found until a signal, or until the time was over
        _say_what_was_found(run, step)


def _say_what_was_found(run: PlannedRun, step: RoadStep) -> None:
    report = run.examined
    for finding in report.findings:
        if finding.name not in CURVE:
            where = f" ({finding.where})" if finding.where else ""
            step.add(finding.level, f"doctor: {finding.name}", f"{finding.message}{where}", finding.cure)
    step.facts = {"good": len(report.good), "skipped": report.skipped}
    step.add("good", "doctor: the rest", f"{len(report.good)} checks found nothing", "It knows many mistakes, not all.")
    reasons: dict[str, list[str]] = {}
    for what, why in report.skipped.items():
        if what not in CURVE:
            reasons.setdefault(why, []).append(what)
    for why, left in reasons.items():
        named = ", ".join(left[:NAMED]) + (f" and {len(left) - NAMED} more" if len(left) > NAMED else "")
        step.add("note", "doctor: not examined", f"{named}: {why}", "Mistakes of these kinds would not be seen.")


def learn_one_batch(run: PlannedRun, step: RoadStep) -> None:
    """One batch, again and again, with its curve."""
    curve = run.examined.one_batch
    if curve is None or not curve.losses:
        raise NotAffordable(run.examined.skipped.get(CURVE[1], "the doctor ended before"))
    log = all(loss > 0 for loss in curve.losses) and curve.reached < 0.1 * curve.start
    points = {"loss": list(enumerate(curve.losses, 1))}
    for name, bound in (("chance", curve.chance), ("floor", curve.floor)):
        if bound is not None and not (log and bound <= 0):
            points[name] = [(1, bound), (len(curve.losses), bound)]
    step.charts["one-batch.svg"] = line_chart(points, title="loss on one batch", log_y=log, height=260)
    step.facts = {"first": curve.start, "reached": curve.reached, "updates": len(curve.losses)}
    if curve.is_learnt or not curve.level:
        risk = "A batch that can be learnt by heart says nothing of new samples."
        step.add("good" if curve.is_learnt else "note", "one batch to zero", curve.verdict, risk)
    else:
        level = curve.level if math.isfinite(curve.reached) else "error"
        risk = "What cannot learn one batch cannot learn more: look for a wrong sign, rate, label or frozen layer."
        step.add(level, "one batch is not learnt", curve.verdict, risk)


# -- smoke ------------------------------------------------------------------------------------------------------------


def smoke(run: PlannedRun, step: RoadStep) -> None:
    """Two updates, a validation, a checkpoint; the run continued from it; the weights loaded into a fresh copy."""
    folder, head = run.scratch / "smoke", run.head_of("val", 2)

    def short(updates: int) -> Trainer:
        saver = _saver(run, every=None, best=None)
        return run.short(updates, put=[saver], run_dir=folder, validate_every="2 updates", log_every=1)

    trained = short(2).fit(run.copy(), run.train, head)
    stages = {name: value for name, value in trained.metrics.items() if name.partition("/")[0] in ("train", "val")}
    shown = ", ".join(f"{name} {value:.4g}" for name, value in stages.items() if "/" in name)
    what = "train and val run" if head else "train runs"
    step.add("good", what, f"2 updates, {shown}", "Two updates see neither the end of an epoch nor rare data.")
    saved = Checkpoints(folder / "checkpoints").all()
    size = sum(file.stat().st_size for path in saved for file in path.rglob("*") if file.is_file())
    again = short(4)
    again.resume = "auto"
    done = again.fit(run.copy(), run.train, head)
    words = f"a checkpoint of {format_bytes(size)} continued from update {again.resumed_from} to {done.updates}"
    step.add("good", "save and load run", words, "Whether bits are the same is the next step.")
    step.facts = {"checkpoint_bytes": size}
    weights = folder / "weights.safetensors"
    if head is not None:
        _loaded(run, step, weights, head, done.metrics)
    for stage in ("test", "predict"):
        _other(run, step, stage, weights, head)


def _saver(run: PlannedRun, **options: Any) -> Checkpoint:
    """The planned checkpoint plugin with other options, or one of its own."""
    own = next((plugin_options(plugin) for plugin in run.stack if isinstance(plugin, Checkpoint)), {})
    return Checkpoint(**{**own, "remote": None, **options})


def _loaded(run: PlannedRun, step: RoadStep, weights: Path, head: Any, expected: dict[str, float]) -> None:
    """A fresh copy with the weights of the file must validate as the run did."""
    found = run.short(1).validate(run.copy(), head, weights=weights)
    apart = {name: abs(value - expected[name]) for name, value in found.items() if name in expected}
    worst = max(apart, key=lambda name: apart[name], default="")
    if worst and apart[worst] > 1e-5 * max(1.0, abs(expected[worst])):
        evidence = f"{worst} is {found[worst]:.6g} with the file's weights, and was {expected[worst]:.6g} in the run"
        step.add("warning", "loaded weights validate otherwise", evidence, "What was measured is not what is shipped.")
    elif worst:
        evidence = f"{counted(len(apart), 'metric')} of a fresh task with weights.safetensors: as in the run"
        step.add("good", "weights can be loaded", evidence, "Weights of another version of the code may not fit.")


def _other(run: PlannedRun, step: RoadStep, stage: str, weights: Path, head: Any) -> None:
    """Test or predict: on its split, or on val, where a task without such a step may refuse."""
    own = run.head_of(stage, 2)
    batches = own if own is not None else next(iter(head.values())) if isinstance(head, dict) else head
    later = f"forge {stage} runs for the first time after training."
    if batches is None:
        step.add("note", f"{stage} was not tried", "there is neither a split for it nor val", later)
        return
    try:
        result = getattr(run.short(1), stage)(run.copy(), batches, weights=weights)
    except Exception as error:
        if own is not None:
            raise
        step.add("note", f"{stage} was not tried", f"it has no split, and does not run on val: {error}", later)
        return
    words = counted(len(result), "output" if stage == "predict" else "metric")
    of = f"{words} of two batches of {'val' if own is None else 'its split'}"
    step.add("good", f"{stage} runs", of, "Two batches are not all of them.")


# -- resume -----------------------------------------------------------------------------------------------------------


class Stops(Plugin):
    """Ends a run after some updates, whatever its plan is."""

    observer = True

    def __init__(self, updates: int):
        super().__init__()
        self.name = "forge_doctor.stops"
        self.updates = updates

    @hookimpl
    def forge_boundary(self, trainer: Trainer) -> None:
        if trainer.progress.update >= self.updates:
            trainer.request_stop(f"{self.updates} updates are enough", by=self.name)


def rehearse(run: PlannedRun, step: RoadStep) -> None:
    """The planned run, of which a second process continues the first checkpoint."""
    run.affords(STOPPED, STOPPED, runs=2)
    folder = run.scratch / "resume"
    saver = _saver(run, every=f"{SAVED} updates")
    trainer = run.trainer(_looks_or_saves, [saver, Rehearse(strict=True), Stops(STOPPED)], run_dir=folder)
    if not trainer.max_epochs and not trainer.max_updates:
        trainer.max_epochs = 10
    trainer.again = run.again
    trainer.fit(run.copy(), run.train, run.loaders["val"])
    verdict = str(
        RunFolder(folder).card.get("resume") or "not rehearsed: FORGE_REHEARSE is off, or the data are too few"
    )
    step.facts = {"verdict": verdict}
    if verdict.startswith("rehearsed, exact"):
        risk = "A kill costs what was trained since the last checkpoint, and nothing else."
        more = verdict.removeprefix("rehearsed, exact").removeprefix(": ")
        words = f"a second process continued the checkpoint of update {SAVED}, bit for bit"
        words += f", but {more}" if more else ""
        step.add("warning" if more else "good", "a resumed run is the same", words, risk)
    elif verdict.startswith("not rehearsed"):
        step.left_out = verdict
    else:
        step.add("warning", "a resumed run differs", verdict, "A run that was interrupted gives another result.")


def _looks_or_saves(plugin: Plugin) -> bool:
    """Whether the second process leaves a plugin out, too."""
    looks = plugin.observer and getattr(plugin, "forge_build_loader", None) is None
    return looks or getattr(plugin, "forge_save", None) is not None


# -- what the stack has -----------------------------------------------------------------------------------------------


def stack(run: PlannedRun, step: RoadStep) -> None:
    """What the planned stack has of what a long run may need, and why that may matter."""
    for item in readiness(run.stack, run.loaders["val"] is not None, run.plan.get("seed")):
        step.add("good" if item.is_on else item.missing, item.what, item.evidence, item.why)
