"""`forge.sweep`: try values of options in many runs, and report the best."""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from forge.config import Recipe, load_recipe
from forge.engine.repeat import as_overrides, check_jobs, check_members
from forge.errors import ForgeError, Interrupted, did_you_mean
from forge.runs.folder import RunFolder
from forge.runs.group import members, open_group
from forge.runs.wording import counted
from forge.runs.wording import number as number_text
from forge.util.children import in_jobs, signals_to
from forge.util.files import atomic_write, make_folder
from forge.util.text import short_path
from forge_sweep.runners import InProcess, OwnProcess, TrialResult, TrialRunner
from forge_sweep.space import parse_spaces
from forge_sweep.study import SweepPlan, SweepStudy, TrialClaim, TrialRow
from forge_sweep.sweep_page import SweepSummary, TrialLine, sweep_page

logger = logging.getLogger("forge")

FOLDER = Path("runs/sweeps")
BEST, REPORT, PLAN = "best.yaml", "report.html", "sweep.json"


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep has found so far."""

    folder: Path
    trials: list[TrialRow]
    best: TrialRow | None
    "The best complete trial; None if there is none yet."
    importance: dict[str, float] = field(default_factory=dict)
    "How much each option matters for the metric, as shares."

    @property
    def best_run(self) -> Path | None:
        """The run folder of the best trial."""
        return None if self.best is None else trial_folder(self.folder, self.best.number)

    @property
    def recipe(self) -> Path:
        """The best recipe, for `forge fit`."""
        return self.folder / BEST


@dataclass(frozen=True, slots=True)
class SweepTarget:
    """What a sweep trains: how to load it with other overrides, how to run it, and what tells it from others."""

    name: str
    load: Callable[[Sequence[str]], Recipe]
    runner: TrialRunner
    identity: list[str]


def sweep(
    recipe: str | Path,
    space: Mapping[str, str] | Iterable[str],
    *,
    metric: str,
    mode: str = "max",
    trials: int = 20,
    jobs: int = 1,
    sampler: str = "tpe",
    prune: bool = False,
    seed: int = 0,
    seeds: Sequence[int] = (),
    folder: str | Path | None = None,
    storage: str | None = None,
    overrides: Sequence[str] = (),
    add: Sequence[str] = (),
    remove: Sequence[str] = (),
    task: type | None = None,
    data: Callable[..., Any] | None = None,
    isolated: bool | None = None,
) -> SweepResult:
    """Train a recipe many times with values from `space`, and report which are best for `metric`.

    `space` has a range for each option: `{"task.lr": "log(1e-4,1e-1)", "task.hidden": "choice(64,256)"}`; other forms
    are `uniform(0,1)`, `int(1,8)` and `logint(16,1024)`. A trial is a normal run below `folder` (by default
    runs/sweeps/RECIPE-ID); its result is the last value of the metric. `sampler` is "tpe", "random" or "grid". `prune`
    stops trials that are worse than others at the same validation. With `seeds` a trial is a group of runs, one for
    each, and its result their mean; `prune` judges it by the first. The same call again continues a sweep that was
    interrupted, and with more `trials` one that was complete; with one job the trials are the same as without the
    interruption. `jobs` trials run at a time; the same call on other machines takes part, if `folder` is shared, or
    `storage` is the URL of a database (it is written nowhere). `overrides`, `add` and `remove` change the recipe as in
    `load_recipe`. With `isolated` each trial has a process of its own; a `task` or `data` given in code runs in this
    one.
    """
    in_code = task is not None or data is not None
    if in_code and isolated:
        raise ForgeError("isolated=True needs a recipe by name; a task or data given in code runs in this process.")

    def load(more: Sequence[str]) -> Recipe:
        return load_recipe(recipe, [*overrides, *more], add, remove, task=task, data=data)

    def words(more: Sequence[str]) -> list[str]:
        stack = [word for name in (*add, *(f"no:{name}" for name in remove)) for word in ("-p", name)]
        return [str(recipe), *overrides, *more, *stack]

    names = [maker.__qualname__ for maker in (task, data) if maker is not None]
    plan = SweepPlan(parse_spaces(space), metric, mode, sampler, prune, seed, tuple(seeds))
    own = not in_code if isolated is None else isolated
    runner = OwnProcess(words, metric) if own else InProcess(load, metric)
    target = SweepTarget(Path(str(recipe)).stem, load, runner, [*words(()), *names])
    return run_sweep(target, plan, trials, jobs, folder, storage)


def run_sweep(
    target: SweepTarget,
    plan: SweepPlan,
    trials: int,
    jobs: int = 1,
    folder: str | Path | None = None,
    storage: str | None = None,
    tell: Callable[[TrialRow], None] = lambda row: None,
) -> SweepResult:
    """Run a sweep, or continue it. `tell` is called with each trial that ended."""
    check_jobs(jobs)
    if jobs > 1 and isinstance(target.runner, InProcess):
        raise ForgeError("Trials in this process run one at a time. Name a recipe, or FILE.py:Task, for several jobs.")
    limit = plan.limit(trials)
    recipe = target.load([space.override(space.example) for space in plan.spaces])  # refuses what no trial could use
    if plan.seeds:
        check_members(recipe, members(plan.seeds))
    seeded = [] if plan.seeds or recipe.trainer.get("seed") is not None else [f"trainer.seed={plan.seed}"]
    home = open_folder(folder, target, plan)
    study = SweepStudy(home, plan, storage)
    crew = Crew(study, target, home, limit, seeded, tell)
    # in this process the Trainer handles signals itself
    with nullcontext() if isinstance(target.runner, InProcess) else signals_to(crew.stop):
        in_jobs(crew.work, jobs)
    result = crew.publish()
    if crew.problem is not None:
        raise crew.problem
    if crew.stopped:
        ended = counted(sum(row.state != "running" for row in result.trials), "trial")
        raise Interrupted(f"The sweep was interrupted after {ended}. The same command continues it.")
    return result


class Crew:
    """The threads of one process that run trials, each one at a time."""

    def __init__(
        self,
        study: SweepStudy,
        target: SweepTarget,
        home: Path,
        limit: int,
        seeded: list[str],
        tell: Callable[[TrialRow], None],
    ):
        self.study, self.target, self.home, self.limit, self.seeded, self.tell = (
            study,
            target,
            home,
            limit,
            seeded,
            tell,
        )
        self.stopped = False
        self.problem: BaseException | None = None
        "An error that would end every trial, or one of the sweep itself."
        self._mutex = threading.Lock()

    def stop(self, *_: Any) -> None:
        """End after the trials that run, which save and end now."""
        if not self.stopped:
            self.stopped = True
            self.target.runner.stop()

    def work(self, device: str | None) -> None:
        """Run trials on a device, one after the other, until there are enough."""
        try:
            while not self.stopped and self.problem is None:
                claim = self.study.claim(self.limit)
                if claim is None:
                    return
                self._try(claim, device)
        except BaseException as error:
            self.problem = self.problem or error

    def _try(self, claim: TrialClaim, device: str | None) -> None:
        """Run a trial to its end, and record it; a trial that was interrupted stays for later."""
        if claim.pruned:  # an earlier attempt was killed before this was recorded
            result = TrialResult()
        else:
            try:
                result = self._train(claim, device)
            except BaseException:
                self.study.leave(claim)
                raise
        if result.interrupted:
            self.study.leave(claim)
            self.stopped = True
            return
        reason = result.reason
        if not reason and result.value is None and not claim.pruned:
            metric = self.study.plan.metric
            reason = f"The trial logged no metric {metric!r}.{did_you_mean(metric, result.known)}"
            self.problem = ForgeError(f"{reason} Name it with --metric.")
        self.study.finish(claim, result.value, reason)
        with self._mutex:
            self.tell(next(row for row in self.study.rows() if row.number == claim.number))
            self.publish()

    def _train(self, claim: TrialClaim, device: str | None) -> TrialResult:
        """Run a trial; with several seeds, a run for each, in a group. Runs that are finished are not made again."""
        folder, plan = trial_folder(self.home, claim.number), self.study.plan
        overrides = [*self.seeded, *claim.overrides]

        def report(update: int, value: float) -> str:
            return self.study.report(claim, update, value)

        if not plan.seeds:
            return self.target.runner(folder, overrides, report, device)
        runs, values = members(plan.seeds), []
        open_group(folder, shlex.join(overrides), [*self.target.identity, *overrides], runs)
        for name, options in runs.items():
            done = RunFolder(folder / name)
            if done.status == "finished" and plan.metric in done.final:
                values.append(done.final[plan.metric])
                continue
            words = [*overrides, *as_overrides(options)]
            result = self.target.runner(folder / name, words, report if not values else lambda *_: "", device)
            if result.value is None or claim.pruned:
                return replace(result, reason=f"{name}: {result.reason}" if result.reason else "")
            values.append(result.value)
        return TrialResult(fmean(values))

    def publish(self) -> SweepResult:
        """Write the best recipe and the report as of now."""
        best, plan = self.study.best(), self.study.plan
        result = SweepResult(self.home, self.study.rows(), best, self.study.importance())
        recipe = ""
        if best is not None:
            spaces = {space.key: space for space in plan.spaces}
            overrides = [spaces[key].override(value) for key, value in best.params.items()]
            header = f"# The best of {len(result.trials)} trials: {plan.metric} {number_text(best.value)} "
            header += f"in trial {best.number} ({', '.join(overrides)}).\n"
            recipe = header + self.target.load([*self.seeded, *overrides]).to_yaml()
            with atomic_write(result.recipe) as path:
                path.write_text(recipe, encoding="utf-8")
        page = sweep_page(summary(result, plan, self.target.name, recipe))
        with atomic_write(self.home / REPORT) as path:
            path.write_text(page, encoding="utf-8", errors="replace")
        return result


def summary(result: SweepResult, plan: SweepPlan, name: str, recipe: str) -> SweepSummary:
    """Return what the page shows."""
    lines = [
        TrialLine(row.number, row.state, row.params, row.value, row.reason, row.seconds, f"trial-{row.number:04d}")
        for row in result.trials
    ]
    options = {space.key: str(space) for space in plan.spaces}
    logs = frozenset(space.key for space in plan.spaces if space.is_log)
    best = None if result.best is None else result.best.number
    how = f"{plan.sampler}{', with pruning' if plan.prune else ''}, seed {plan.seed}"
    how += f", each trial with the seeds {', '.join(map(str, plan.seeds))}" if plan.seeds else ""
    return SweepSummary(name, plan.metric, plan.mode, how, options, logs, lines, best, result.importance, recipe)


def trial_folder(home: Path, number: int) -> Path:
    return home / f"trial-{number:04d}"


def open_folder(folder: str | Path | None, target: SweepTarget, plan: SweepPlan) -> Path:
    """Return the folder of a sweep, which has its plan; refuse a folder of another sweep."""
    described = {
        "target": target.identity,
        "space": {space.key: str(space) for space in plan.spaces},
        **{name: getattr(plan, name) for name in ("metric", "mode", "sampler", "prune", "seed")},
        **({"seeds": list(plan.seeds)} if plan.seeds else {}),
    }
    text = json.dumps(described, indent=2) + "\n"
    home = Path(folder) if folder is not None else FOLDER / f"{target.name}-{_short_hash(text)}"
    make_folder(home)
    file = home / PLAN
    if file.exists():
        then = json.loads(file.read_text(encoding="utf-8"))
        for name in {**described, **then}:
            if then.get(name) != described.get(name):
                raise ForgeError(
                    f"{short_path(home)} holds another sweep: its {name} is {then.get(name)!r}, not "
                    f"{described.get(name)!r}. Name another folder."
                )
    else:
        with atomic_write(file) as path:
            path.write_text(text, encoding="utf-8")
    return home.absolute()


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
