"""ready: walk the road that a careful person walks before a long run, and say whether it may begin.

::

    report = forge.ready(MyTask(), train, val, max_epochs=100)
    print(report.answer)
    assert report.may_start
"""

from __future__ import annotations

import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forge.config.arguments import Plugins
from forge.config.recipe import Recipe
from forge.contract.task import TaskModule
from forge.data.splits import live_loaders
from forge.errors import ForgeError
from forge.runs.card import group_of
from forge.runs.job import name_of
from forge.runs.wording import duration
from forge.tuning.trial import quiet
from forge.util.text import short_path
from forge.util.time_limit import time_limit
from forge.util.tracebacks import is_users
from forge_doctor.patient import each, no_trace
from forge_doctor.ready import measured, tried
from forge_doctor.ready.look import look
from forge_doctor.ready.planned_run import NotAffordable, PlannedRun
from forge_doctor.ready.report import ReadyReport, RoadStep
from forge_doctor.signals import ended_by_signals
from forge_doctor.stored import kept

BUDGET = 10.0
"""Minutes, unless told otherwise."""
SHARE = 0.5
"""The share of the time left that a step may take."""
PLACE = Path("runs") / "ready"
Work = Callable[[PlannedRun, RoadStep], None]
STEPS: list[tuple[str, str, Work]] = [
    ("data", "data looked at", look),
    ("doctor", "doctor", tried.examine),
    ("one-batch", "one batch to zero", tried.learn_one_batch),
    ("smoke", "smoke of every stage, save and load", tried.smoke),
    ("resume", "resume rehearsed", tried.rehearse),
    ("precision", "precision", measured.precision),
    ("device", "device, time and price", measured.device),
    ("speed", "speed", measured.speed),
    ("determinism", "determinism", measured.determinism),
    ("stack", "clipping, guard, checkpoints, early stopping", tried.stack),
]
NEEDED = ("data", "doctor", "one-batch", "smoke")
"""Steps without which nothing shows that it trains."""
MEASURED = ("precision", "device", "speed", "determinism")
"""Steps that only compare: what the run needs has been tried before."""
FREE, GIVEN = ("stack",), 60.0
"""Steps that take no time, and the seconds that they are given all the same."""


class OverTime(BaseException):
    """Ends a step; not an Exception, since examinations go on after those."""


def ready(
    task: TaskModule,
    train: Any,
    val: Any = None,
    *,
    test: Any = None,
    predict: Any = None,
    plugins: Plugins | None = None,
    budget: float = BUDGET,
    keep_going: bool = False,
    price: float | None = None,
    out: str | Path | bool | None = None,
    tell: Callable[[RoadStep, bool], None] = lambda step, is_done: None,
    **trainer: Any,
) -> ReadyReport:
    """Try what a long run will need, within `budget` minutes, and answer whether it may start.

    `plugins` and other arguments of `forge.Trainer` (`recipe`, `max_epochs`, `device`) describe the planned run. The
    task, the data, run folders and all generators stay as they are. A step that finds an error ends the road, unless
    `keep_going`. `price` is that of an hour of the device. `tell` is called with each step when it begins, and with
    True when it is done. The report is written to `out`, by default runs/ready/NAME (False: nowhere).
    """
    loaders = {"train": train, "val": val, "test": test, "predict": predict}
    report = walk(
        task, loaders, plugins, trainer, budget=budget, keep_going=keep_going, price=price, out=out, tell=tell
    )
    if report.interrupted == signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
    return report


def walk(
    task: TaskModule,
    loaders: dict[str, Any],
    plugins: Plugins | None,
    settings: dict[str, Any],
    *,
    budget: float,
    keep_going: bool,
    out: str | Path | bool | None,
    tell: Callable[[RoadStep, bool], None],
    **more: Any,
) -> ReadyReport:
    """Walk the road; `more` are fields of the PlannedRun."""
    if not 0 < budget < float("inf"):
        raise ForgeError(f"budget={budget:g}: it must be above 0, in minutes.")
    for loader in live_loaders(each(loaders)):
        loader.attach(task)
    if plugins is None and "recipe" not in settings:
        settings = {"recipe": "default", **settings}
    with tempfile.TemporaryDirectory(prefix="forge-ready-", ignore_cleanup_errors=True) as scratch:
        run = PlannedRun(task, loaders, plugins, settings, Path(scratch), **more)
        recipe = settings.get("recipe")
        name = group_of(recipe if isinstance(recipe, Recipe) else None, name_of(task))
        report = ReadyReport(name, budget=budget)
        began = time.monotonic()
        with ended_by_signals(), no_trace(torch.device("cpu")), kept(*each(loaders).values()), quiet():
            _steps(run, report, began + 60 * budget, keep_going, tell)
        report.seconds = time.monotonic() - began
    if out is not False:
        report.save(PLACE / name if out is None or out is True else Path(out))
    return report


def _steps(
    run: PlannedRun, report: ReadyReport, end: float, keep_going: bool, tell: Callable[[RoadStep, bool], None]
) -> None:
    ended = ""
    for number, (name, title, work) in enumerate(STEPS, 1):
        step = RoadStep(number, name, title, name in NEEDED)
        report.steps.append(step)
        left = end - time.monotonic() if name not in FREE else 2 * GIVEN
        step.left_out = ended or (f"The budget of {report.budget:g} min was spent." if left <= 0 else "")
        if step.left_out:
            continue
        tell(step, False)
        _do(work, run, step, report, SHARE * left)
        tell(step, True)
        if report.interrupted:
            ended = "It was interrupted."
        elif step.level == "error" and not keep_going:
            ended = f"Step {number}, {title}, found an error (go on after it: --keep-going, keep_going=True)."


def _do(work: Work, planned: PlannedRun, step: RoadStep, report: ReadyReport, seconds: float) -> None:
    """Do one step. What it raises is what a run would raise; a signal ends the road with what it has."""
    began = time.monotonic()
    planned.until = began + seconds
    try:
        with time_limit(seconds, OverTime):
            work(planned, step)
    except OverTime:
        step.left_out = f"It takes more than {duration(seconds)}, half of the budget's time that was left."
    except NotAffordable as error:
        step.left_out = f"{error}."
    except (KeyboardInterrupt, SystemExit) as error:
        report.interrupted = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        step.left_out = "It was interrupted."
    except Exception as error:
        words = _said(error)
        if step.name in MEASURED:
            step.left_out = f"It could not be measured: {words}"
        else:
            step.add("error", f"{step.title} does not run", words, "A long run fails in the same way, later.")
    step.seconds = time.monotonic() - began


def _said(error: Exception) -> str:
    """What an error says, with what is known of it, and the user's own line."""
    if isinstance(error, ForgeError):
        return str(error)[:600]
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    where = f"{short_path(lines[-1].filename)}:{lines[-1].lineno}: " if lines else ""
    notes = " ".join(note.removeprefix("forge: ") for note in getattr(error, "__notes__", ()))
    return f"{where}{type(error).__name__}: {error} {notes}".strip()[:600]
