"""Steps that try what must work: the doctor, one batch, every stage, save and load, resume; and what the stack has."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from torch import nn

from forge.checkpoint import Checkpoints
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin, plugin_options
from forge.contract.task import defines
from forge.engine.trainer import Trainer
from forge.report.svg import line_chart
from forge.runs.folder import RunFolder
from forge.util.text import format_bytes
from forge_doctor.doctor import doctor
from forge_doctor.patient import first
from forge_doctor.readiness import readiness
from forge_doctor.ready.one_batch import one_batch
from forge_doctor.ready.report import RoadStep
from forge_doctor.ready.subject import Subject
from forge_plugins import Checkpoint

ONE_BATCH, FEWEST = 200, 20
"""Updates on one batch, and the fewest that say something."""
SAVED, STOPPED = 4, 8
"""The update of the checkpoint that is rehearsed, and the last one."""


def examine(subject: Subject, step: RoadStep) -> None:
    """The doctor: errors end the road."""
    plugins = subject.plugins if subject.plugins is not None else ()
    report = doctor(subject.task, subject.train, subject.loaders["val"], plugins=plugins, **_own(subject))
    for finding in report.findings:
        where = f" ({finding.where})" if finding.where else ""
        step.add(finding.level, f"doctor: {finding.name}", f"{finding.message}{where}", finding.cure)
    step.facts = {"good": len(report.good), "skipped": report.skipped}
    of = f"{len(report.good)} checks found nothing" + (
        f"; {len(report.skipped)} could not be made" * bool(report.skipped)
    )
    step.add("good", "doctor: the rest", of, "It knows many mistakes, not all.")


def _own(subject: Subject) -> dict[str, Any]:
    """The planned settings, without those that name folders."""
    return {key: value for key, value in subject.settings.items() if key not in ("run_dir", "resume")}


def learn_one_batch(subject: Subject, step: RoadStep) -> None:
    """One batch, again and again, with its curve."""
    plugins = subject.plugins if subject.plugins is not None else ()
    settings = {"seed": subject.seed, "log_every": 10_000, **_own(subject)}
    settings |= {"validate_every": None, "run_dir": False, "resume": None}
    options: dict[str, Any] = {"plugins": plugins, "settings": settings}
    for _ in range(2):  # what is imported and compiled at the first use counts once
        began = time.monotonic()
        one_batch(subject.copy(), subject.train, updates=3, **options)
        subject.update_seconds = (time.monotonic() - began) / 3
    updates, began = subject.affords(ONE_BATCH, FEWEST), time.monotonic()
    curve = one_batch(subject.copy(), subject.train, updates=updates, **options)
    subject.update_seconds = (time.monotonic() - began) / updates
    points = {"loss": list(enumerate(curve.losses, 1))}
    for name, bound in (("chance", curve.chance), ("floor", curve.floor)):
        if bound is not None:
            points[name] = [(1, bound), (len(curve.losses), bound)]
    log = all(loss > 0 for loss in curve.losses) and curve.reached < 0.1 * curve.losses[0]
    chart = line_chart(points, title="loss on one batch", log_y=log, height=260)
    step.charts["one-batch.svg"] = chart
    step.facts = {"first": curve.losses[0], "reached": curve.reached, "updates": len(curve.losses)}
    if curve.is_learnt:
        left = curve.reached - (curve.floor or 0.0)
        far = left > 0.5 * abs(curve.losses[0] - (curve.floor or 0.0))
        risk = (
            "It is far from zero: is the rate too low, or is there noise in each step?"
            if far
            else ("A batch that can be learnt by heart says nothing of new samples.")
        )
        step.add("note" if far else "good", "one batch is learnt", curve.verdict, risk)
    else:
        broken = not math.isfinite(curve.reached)
        risk = "What cannot learn one batch cannot learn more: look for a wrong sign, rate, label or frozen layer."
        step.add("error" if broken else "warning", "one batch is not learnt", curve.verdict, risk)


# -- smoke ------------------------------------------------------------------------------------------------------------


def smoke(subject: Subject, step: RoadStep) -> None:
    """Two updates, a validation, a checkpoint; the run continued from it; the weights loaded into a fresh copy."""
    folder = subject.scratch / "smoke"
    rhythm: dict[str, Any] = {"run_dir": folder, "validate_every": "2 updates", "log_every": 1}
    head = _two(subject.val_head)
    trained = subject.short(2, put=[_saver(subject, every=None, rehearse="off", best=None)], **rhythm).fit(
        subject.copy(), subject.train, head
    )
    shown = ", ".join(
        f"{name} {value:.4g}"
        for name, value in trained.metrics.items()
        if "/" in name and name.split("/")[0] in ("train", "val")
    )
    step.add(
        "good", "train and val run", f"2 updates, {shown}", "Two updates see neither the end of an epoch nor rare data."
    )
    saved = Checkpoints(folder / "checkpoints").all()
    size = sum(file.stat().st_size for path in saved for file in path.rglob("*") if file.is_file())
    again = subject.short(4, put=[_saver(subject, every=None, rehearse="off", best=None)], **rhythm)
    again.resume = "auto"
    done = again.fit(subject.copy(), subject.train, head)
    words = f"a checkpoint of {format_bytes(size)} continued from update {again.resumed_from} to {done.updates}"
    step.add("good", "save and load run", words, "Whether bits are the same is the next step.")
    step.facts = {"checkpoint_bytes": size}
    if head is not None:
        _loaded(subject, step, folder, head, done.metrics)
    _others(subject, step, folder, head)


def _saver(subject: Subject, **options: Any) -> Checkpoint:
    """The planned checkpoint plugin with other options, or one of its own."""
    own = next((plugin_options(plugin) for plugin in subject.stack if isinstance(plugin, Checkpoint)), {})
    return Checkpoint(**{**own, "remote": None, **options})


def _two(val: Any) -> Any:
    if isinstance(val, dict):
        return {name: batches[:2] for name, batches in val.items()}
    return val[:2] if val else None


def _loaded(subject: Subject, step: RoadStep, folder: Path, head: Any, expected: dict[str, float]) -> None:
    """A fresh copy with the weights of the file must validate as the run did."""
    found = subject.short(1).validate(subject.copy(), head, weights=folder / "weights.safetensors")
    apart = {name: abs(value - expected[name]) for name, value in found.items() if name in expected}
    worst = max(apart, key=lambda name: apart[name], default="")
    if worst and apart[worst] > 1e-5 * max(1.0, abs(expected[worst])):
        evidence = (
            f"{worst} is {found[worst]:.6g} with the weights of the file, and was {expected[worst]:.6g} in the run"
        )
        step.add("warning", "loaded weights validate otherwise", evidence, "What was measured is not what is shipped.")
    elif worst:
        evidence = f"{len(apart)} metrics of a fresh task with weights.safetensors are those of the run"
        step.add("good", "weights can be loaded", evidence, "Weights of another version of the code may not fit.")


def _others(subject: Subject, step: RoadStep, folder: Path, head: Any) -> None:
    """Test and predict, where the task or the data have them."""
    task = subject.task
    forwards = type(task).forward is not nn.Module.forward
    for stage, has in (("test", defines(task, "test_step")), ("predict", defines(task, "predict_step"))):
        given = subject.loaders[stage]
        batches = first(next(iter(given.values())) if isinstance(given, dict) else given, 2) or head
        if batches is None or not (has or given is not None):
            why = "the task has no step of its own for it, and there is no split" if not has else "there are no data"
            step.add("note", f"{stage} was not tried", why, f"forge {stage} is tried for the first time after the run.")
            continue
        if stage == "predict" and not has and not forwards:
            continue
        result = getattr(subject.short(1), stage)(subject.copy(), batches, weights=folder / "weights.safetensors")
        words = f"{len(result)} {'batches' if stage == 'predict' else 'metrics'}"
        step.add(
            "good", f"{stage} runs", f"{words} on {'its split' if given is not None else 'val'}", "Two batches only."
        )


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


def rehearse(subject: Subject, step: RoadStep) -> None:
    """The planned run, of which a second process continues the first checkpoint."""
    subject.affords(STOPPED, STOPPED, runs=2)
    folder = subject.scratch / "resume"
    saver = _saver(subject, every=f"{SAVED} updates", rehearse="strict")
    trainer = subject.trainer(_looks_or_saves, [saver, Stops(STOPPED)], run_dir=folder)
    if not trainer.max_epochs and not trainer.max_updates:
        trainer.max_epochs = 10
    trainer.again = subject.again
    trainer.fit(subject.copy(), subject.train, subject.loaders["val"])
    verdict = str(
        RunFolder(folder).card.get("resume") or "not rehearsed: FORGE_REHEARSE is off, or the data are too few"
    )
    step.facts = {"verdict": verdict}
    if verdict.startswith("rehearsed, exact"):
        risk = "A kill costs what was trained since the last checkpoint, and nothing else."
        more = verdict.removeprefix("rehearsed, exact").removeprefix(": ")
        words = (
            f"a second process continued the checkpoint of update {SAVED}, bit for bit{f', but {more}' if more else ''}"
        )
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


def stack(subject: Subject, step: RoadStep) -> None:
    """What the planned stack has of what a long run may need, and why that may matter."""
    for item in readiness(subject.stack, subject.loaders["val"] is not None, subject.plan.get("seed")):
        step.add("good" if item.is_on else item.missing, item.what, item.evidence, item.why)
