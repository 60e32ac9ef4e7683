"""`forge.sweep`: try values of options in many runs, and report the best."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.config import Recipe, read_recipe
from forge.engine.repeat import check_jobs
from forge.errors import ForgeError, Interrupted, did_you_mean
from forge.runs.folder import RunFolder
from forge.runs.wording import counted
from forge.runs.wording import number as number_text
from forge.util.children import in_jobs, signals_to
from forge.util.files import atomic_write
from forge_sweep.runners import InProcess, OwnProcess, TrialRunner
from forge_sweep.space import parse_spaces
from forge_sweep.study import JOURNAL, SweepPlan, SweepStudy, TrialClaim

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

FOLDER = Path("runs/sweeps")
BEST = "best.yaml"


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep has found so far."""

    folder: Path
    trials: list[FrozenTrial]
    best: FrozenTrial | None
    "The best complete trial; None if there is none yet."

    @property
    def best_run(self) -> Path | None:
        """The run folder of the best trial."""
        return None if self.best is None else trial_folder(self.folder, self.best.number)

    @property
    def recipe(self) -> Path:
        """The best recipe, for `forge fit`."""
        return self.folder / BEST

    @property
    def journal(self) -> Path:
        """The file with all trials, which `optuna-dashboard` shows; there is none where they are in a database."""
        return self.folder / JOURNAL


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
    folder: str | Path | None = None,
    storage: str | None = None,
    overrides: Sequence[str] = (),
    add: Sequence[str] = (),
    remove: Sequence[str] = (),
    task: type | None = None,
    data: Callable[..., Any] | None = None,
) -> SweepResult:
    """Train a recipe many times with values from `space`, and report which are best for `metric`.

    `space` has a range for each option: `{"task.lr": "log(1e-4,1e-1)", "task.hidden": "choice(64,256)"}`; other forms
    are `uniform(0,1)`, `int(1,8)` and `logint(16,1024)`. A trial is a normal run below `folder` (by default
    runs/sweeps/RECIPE-ID); its result is the last value of the metric. `sampler` is "tpe", "random" or "grid". `prune`
    stops trials that are worse than others at the same validation. The same call again continues a sweep that was
    interrupted, and with more `trials` one that was complete; with one job the trials are the same as without the
    interruption. `jobs` trials run at a time; the same call on other machines takes part, if `folder` is shared, or
    `storage` is the URL of a database (it is written nowhere). `overrides`, `add` and `remove` change the recipe as in
    `forge.recipe`. Each trial has a process of its own; a `task` or `data` given in code runs in this one.
    """

    def load(more: Sequence[str]) -> Recipe:
        return read_recipe(recipe, [*overrides, *more], add, remove, task=task, data=data).checked()

    def words(more: Sequence[str]) -> list[str]:
        stack = [word for name in (*add, *(f"no:{name}" for name in remove)) for word in ("-p", name)]
        return [str(recipe), *overrides, *more, *stack]

    names = [maker.__qualname__ for maker in (task, data) if maker is not None]
    plan = SweepPlan(parse_spaces(space), metric, mode, sampler, prune, seed)
    runner = InProcess(load, metric) if names else OwnProcess(words, metric)
    target = SweepTarget(Path(str(recipe)).stem, load, runner, [*words(()), *names])
    return run_sweep(target, plan, trials, jobs, folder, storage)


def run_sweep(
    target: SweepTarget,
    plan: SweepPlan,
    trials: int,
    jobs: int = 1,
    folder: str | Path | None = None,
    storage: str | None = None,
    tell: Callable[[FrozenTrial], None] = lambda trial: None,
) -> SweepResult:
    """Run a sweep, or continue it. `tell` is called with each trial that ended."""
    check_jobs(jobs)
    if jobs > 1 and isinstance(target.runner, InProcess):
        raise ForgeError("Trials in this process run one at a time. Name a recipe, or FILE.py:Task, for several jobs.")
    limit = plan.limit(trials)
    recipe = target.load([space.override(space.example) for space in plan.spaces])  # refuses what no trial could use
    seeded = [] if recipe.trainer.get("seed") is not None else [f"trainer.seed={plan.seed}"]
    home = Path(folder if folder is not None else default_folder(target, plan)).absolute()
    study = SweepStudy(home, plan, storage, target.identity)
    crew = Crew(study, target, home, limit, seeded, tell)
    # in this process the Trainer handles signals itself
    with nullcontext() if isinstance(target.runner, InProcess) else signals_to(crew.stop):
        in_jobs(crew.work, jobs)
    result = crew.publish()
    if crew.problem is not None:
        raise crew.problem
    if crew.stopped:
        ended = counted(sum(trial.state.is_finished() for trial in result.trials), "trial")
        raise Interrupted(f"The sweep was interrupted after {ended}. The same command continues it.")
    return result


@dataclass(eq=False, slots=True)
class Crew:
    """The threads of one process that run trials, each one at a time."""

    study: SweepStudy
    target: SweepTarget
    home: Path
    limit: int
    seeded: list[str]
    "Overrides that give every trial the seed."
    tell: Callable[[FrozenTrial], None]
    stopped: bool = False
    problem: BaseException | None = None
    "An error that would end every trial, or one of the sweep itself."
    _mutex: threading.Lock = field(default_factory=threading.Lock)

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
        except Interrupted:
            self.stopped = True
        except BaseException as error:
            self.problem = self.problem or error

    def _try(self, claim: TrialClaim, device: str | None) -> None:
        """Run a trial to its end, and record it; a trial that was interrupted stays for later."""
        try:
            # an earlier attempt may have been killed after it was pruned, before this was recorded
            value, reason = (None, "") if claim.pruned else self._train(claim, device)
        except BaseException:
            self.study.leave(claim)
            raise
        ended = self.study.finish(claim, value, reason)
        with self._mutex:
            self.tell(ended)
            self.publish()

    def _train(self, claim: TrialClaim, device: str | None) -> tuple[float | None, str]:
        """Return a trial's value, else why it has none. A run that is finished is not made again."""
        folder, metric = trial_folder(self.home, claim.number), self.study.plan.metric
        if RunFolder(folder).status != "finished":
            report = partial(self.study.report, claim)
            reason = self.target.runner(folder, [*self.seeded, *claim.overrides], report, device)
            if reason or claim.pruned:
                return None, reason
        final = RunFolder(folder).final
        if metric not in final:
            reason = f"The trial logged no metric {metric!r}.{did_you_mean(metric, sorted(final))}"
            self.problem = ForgeError(f"{reason} Name it with --metric.")
            return None, reason
        return final[metric], ""

    def publish(self) -> SweepResult:
        """Write the best recipe as of now."""
        best, plan = self.study.best(), self.study.plan
        result = SweepResult(self.home, self.study.trials(), best)
        if best is not None:
            spaces = {space.key: space for space in plan.spaces}
            overrides = [spaces[key].override(value) for key, value in best.params.items()]
            header = f"# The best of {len(result.trials)} trials: {plan.metric} {number_text(best.value)} "
            header += f"in trial {best.number} ({', '.join(overrides)}).\n"
            with atomic_write(result.recipe) as path:
                recipe = self.target.load([*self.seeded, *overrides])
                path.write_text(header + recipe.to_yaml(), encoding="utf-8")
        return result


def trial_folder(home: Path, number: int) -> Path:
    return home / f"trial-{number:04d}"


def default_folder(target: SweepTarget, plan: SweepPlan) -> Path:
    """Return the folder of a sweep, which its plan names."""
    text = json.dumps([target.identity, plan.described()])
    return FOLDER / f"{target.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
