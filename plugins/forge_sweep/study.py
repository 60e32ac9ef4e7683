"""The trials of a sweep in an Optuna storage: hand out the next one, record what it gives.

What trial number n tries follows from the seed of the sweep, n and the trials before it, never from a sampler of some
process. So a sweep with one job tries the same values again, also if it was killed in between.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import CheckpointError, ForgeError
from forge.rng import combine_seeds
from forge.runs.lock import RunLock
from forge.runs.wording import number as number_text
from forge.util.files import make_folder
from forge_sweep.space import ParameterValue, Space, combinations

if TYPE_CHECKING:
    import optuna

CLAIMS, JOURNAL = ".claims", "journal.log"
SAMPLERS = ("tpe", "random", "grid")
REDUCTION = 3
"""Pruning keeps one in three trials at the validations 1, 3, 9, 27, ..."""


def import_optuna() -> Any:
    """Import Optuna, quietly; raise ForgeError with the line that installs it."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ForgeError(f"A sweep needs {error.name}: pip install 'forge-trainer[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep is for; all processes of a sweep have the same plan."""

    spaces: list[Space]
    metric: str
    mode: str
    sampler: str = "tpe"
    prune: bool = False
    seed: int = 0
    seeds: tuple[int, ...] = ()
    "Each trial is trained once with each of these; its result is their mean."

    def __post_init__(self) -> None:
        for name, value, known in (("mode", self.mode, ("max", "min")), ("sampler", self.sampler, SAMPLERS)):
            if value not in known:
                raise ForgeError(f"{name} is {value!r}; it takes {', '.join(known[:-1])} or {known[-1]}.")
        if not 0 <= self.seed < 2**31:
            raise ForgeError(f"The seed of a sweep is {self.seed}; it must be between 0 and 2147483647.")
        if self.sampler == "grid":
            combinations(self.spaces)

    def limit(self, trials: int) -> int:
        """Return the number of trials: at most as many as the grid has."""
        if trials < 1:
            raise ForgeError(f"--trials is {trials}; it must be at least 1.")
        return min(trials, len(combinations(self.spaces))) if self.sampler == "grid" else trials


@dataclass(slots=True)
class TrialRow:
    """One trial, as reports show it."""

    number: int
    state: str
    "complete, pruned, failed or running."
    params: dict[str, ParameterValue]
    value: float | None = None
    reason: str = ""
    "Why it failed, or was pruned."
    seconds: float = 0.0


@dataclass(slots=True)
class TrialClaim:
    """A trial that this process has taken on."""

    trial: Any
    lock: RunLock
    params: dict[str, ParameterValue]
    overrides: list[str]
    updates: list[int] = field(default_factory=list)
    "Updates at which the metric was reported, in this attempt or an earlier one."
    pruned: bool = False

    @property
    def number(self) -> int:
        return self.trial.number


class SweepStudy:
    """The trials of one sweep; used by all threads of a process, and beside other processes."""

    def __init__(self, folder: Path, plan: SweepPlan, storage: str | None = None):
        self.folder, self.plan, self.is_shared = folder, plan, storage is not None
        self._optuna = optuna = import_optuna()
        self._mutex = threading.RLock()
        self._given = given_sampler(optuna)
        options = {"min_resource": 1, "reduction_factor": REDUCTION, "min_early_stopping_rate": 0}
        pruner = optuna.pruners.SuccessiveHalvingPruner(**options) if plan.prune else optuna.pruners.NopPruner()
        with self._alone():
            self._study: optuna.Study = optuna.create_study(
                study_name=folder.name,
                storage=storage or journal(optuna, folder / JOURNAL),
                direction="maximize" if plan.mode == "max" else "minimize",
                sampler=self._given,
                pruner=pruner,
                load_if_exists=True,
            )

    # -- hand out -----------------------------------------------------------------------------------------------------

    def claim(self, limit: int) -> TrialClaim | None:
        """Take on the first trial that a dead process has left, else a new one; None if there are enough."""
        running = self._optuna.trial.TrialState.RUNNING
        with self._alone():
            known = self._study.get_trials(deepcopy=False)
            for frozen in (trial for trial in known if trial.state == running):
                lock = self._lock_if_left(frozen.number)
                if lock is not None:
                    now = self._study.get_trials(deepcopy=False)[frozen.number]
                    if now.state != running:  # its process has just recorded its end
                        lock.release()
                        continue
                    self._given.values = self._suggestion(frozen.number)  # before Trial() asks the sampler
                    return self._claimed(self._optuna.trial.Trial(self._study, frozen._trial_id), lock)
            if len(known) >= limit:
                return None
            trial = self._study.ask()
            lock = self._claim_lock(trial.number)
            lock.acquire()
            self._given.values = self._suggestion(trial.number)
            return self._claimed(trial, lock)

    def _claimed(self, trial: optuna.Trial, lock: RunLock) -> TrialClaim:
        spaces = self.plan.spaces
        values = {space.key: space.suggest(trial) for space in spaces}
        updates, pruned = trial.user_attrs.get("updates", []), "pruned_at" in trial.user_attrs
        overrides = [space.override(values[space.key]) for space in spaces]
        return TrialClaim(trial, lock, values, overrides, list(updates), pruned)

    def _suggestion(self, number: int) -> dict[str, ParameterValue]:
        """Return the values of a trial, from the seed, its number and the trials before it."""
        optuna, plan, samplers = self._optuna, self.plan, self._optuna.samplers
        if plan.sampler == "grid":
            return combinations(plan.spaces)[number]
        seed = combine_seeds(plan.seed, number) % 2**32
        sampler = (
            samplers.RandomSampler(seed)
            if plan.sampler == "random"
            else samplers.TPESampler(seed=seed, constant_liar=True)
        )
        scratch = optuna.create_study(direction=self._study.direction, sampler=sampler)
        before = [trial for trial in self._study.get_trials(deepcopy=False) if trial.number < number and trial.params]
        scratch.add_trials([self._plain(trial) for trial in before])
        trial = scratch.ask()
        return {space.key: space.suggest(trial) for space in plan.spaces}

    def _plain(self, trial: Any) -> Any:
        """Return a copy of a trial for another study: values and results alone."""
        known = {"params": trial.params, "distributions": trial.distributions}
        is_over = trial.state.is_finished() and trial.value is not None
        value = trial.value if is_over else None
        intermediate = {step: value for step, value in trial.intermediate_values.items() if not math.isnan(value)}
        return self._optuna.trial.create_trial(
            state=trial.state, value=value, intermediate_values=intermediate, **known
        )

    def _claim_lock(self, number: int) -> RunLock:
        return RunLock(self.folder / CLAIMS / f"{number:04d}")

    def _lock_if_left(self, number: int) -> RunLock | None:
        """Lock a running trial whose process is gone; a trial of another machine's folder is not known to be left."""
        lock = self._claim_lock(number)
        if self.is_shared and not lock.run_dir.is_dir():
            return None
        try:
            lock.acquire()
        except CheckpointError:
            return None
        return lock

    # -- record -------------------------------------------------------------------------------------------------------

    def report(self, claim: TrialClaim, update: int, value: float) -> str:
        """Record an intermediate value; return why the trial is to stop, else an empty text.

        A resumed trial reports some updates again; they have their former place.
        """
        with self._mutex:
            if update not in claim.updates:
                claim.updates.append(update)
                claim.trial.set_user_attr("updates", claim.updates)
            place = claim.updates.index(update) + 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a value that is there already
                claim.trial.report(value, place)
            if self.plan.prune and not claim.pruned and claim.trial.should_prune():
                claim.trial.set_user_attr("pruned_at", update)
                claim.pruned = True
            return f"pruned: {self.plan.metric} is {number_text(value)} at validation {place}" if claim.pruned else ""

    def finish(self, claim: TrialClaim, value: float | None, reason: str = "") -> str:
        """Record the end of a trial: with a value, pruned, or failed for a reason. Return its state."""
        states = self._optuna.trial.TrialState
        if not reason and value is not None and not math.isfinite(value) and not claim.pruned:
            reason = f"{self.plan.metric} is {value}"
        with self._mutex:
            try:
                if reason:
                    claim.trial.set_user_attr("reason", reason)
                    self._study.tell(claim.trial, state=states.FAIL)
                    return "failed"
                if claim.pruned:
                    self._study.tell(claim.trial, state=states.PRUNED)
                    return "pruned"
                self._study.tell(claim.trial, value)
                return "complete"
            finally:
                claim.lock.release()

    def leave(self, claim: TrialClaim) -> None:
        """Leave a trial for later: the next process of this sweep resumes it."""
        claim.lock.release()

    # -- read ---------------------------------------------------------------------------------------------------------

    def rows(self) -> list[TrialRow]:
        """Return all trials, in order."""
        words = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
        with self._mutex:
            known = self._study.get_trials(deepcopy=False)
        return [
            TrialRow(
                trial.number,
                words.get(trial.state.name, "running"),
                dict(trial.params),
                trial.value if trial.state.name != "FAIL" else None,
                _reason(trial),
                trial.duration.total_seconds() if trial.duration is not None else 0.0,
            )
            for trial in known
        ]

    def best(self) -> TrialRow | None:
        """Return the best complete trial; of equal ones the earliest."""
        complete = [row for row in self.rows() if row.state == "complete" and row.value is not None]
        sign = -1.0 if self.plan.mode == "max" else 1.0
        return min(complete, key=lambda row: (sign * (row.value or 0.0), row.number), default=None)

    def importance(self) -> dict[str, float]:
        """Return how much each option matters for the metric, as shares; empty where there are too few trials."""
        evaluator = self._optuna.importance.PedAnovaImportanceEvaluator()
        with self._mutex, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = self._optuna.importance.get_param_importances(self._study, evaluator=evaluator)
            except (RuntimeError, ValueError):
                return {}
        return {key: share for key, share in found.items() if math.isfinite(share)}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads, and other processes that use this folder, from taking trials."""
        with self._mutex:
            lock = RunLock(self.folder / CLAIMS)
            for _ in itertools.count():
                try:
                    lock.acquire()
                    break
                except CheckpointError:
                    time.sleep(0.05)
            try:
                yield
            finally:
                lock.release()


def _reason(trial: Any) -> str:
    if trial.state.name == "PRUNED":
        return f"pruned at update {trial.user_attrs.get('pruned_at')}"
    return str(trial.user_attrs.get("reason", ""))


def journal(optuna: Any, file: Path) -> Any:
    """Return a storage in a file, which several machines may share; a line that a kill has cut short is removed."""
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    make_folder(file.parent)
    lock = JournalFileSymlinkLock(str(file))
    if file.exists():
        lock.acquire()
        try:
            with file.open("rb+") as content:
                whole = content.read().rpartition(b"\n")
                content.truncate(len(whole[0]) + len(whole[1]))
        finally:
            lock.release()
    return optuna.storages.JournalStorage(JournalFileBackend(str(file), lock_obj=lock))


def given_sampler(optuna: Any) -> Any:
    """Return a sampler that answers with `values`, which were worked out before."""

    class Given(optuna.samplers.BaseSampler):
        values: dict[str, ParameterValue] = {}

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            return self.values[param_name]

    return Given()
