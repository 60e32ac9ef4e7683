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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import CheckpointError, ForgeError
from forge.rng import combine_seeds
from forge.runs.lock import RunLock
from forge.runs.wording import number as number_text
from forge.util.files import make_folder
from forge.util.text import short_path
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

    def __post_init__(self) -> None:
        for name, value, known in (("mode", self.mode, ("max", "min")), ("sampler", self.sampler, SAMPLERS)):
            if value not in known:
                raise ForgeError(f"{name} is {value!r}; it takes {', '.join(known[:-1])} or {known[-1]}.")
        if not 0 <= self.seed < 2**31:
            raise ForgeError(f"The seed of a sweep is {self.seed}; it must be between 0 and 2147483647.")
        if self.sampler == "grid":
            combinations(self.spaces)

    def described(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        plain = {name: getattr(self, name) for name in ("metric", "mode", "sampler", "prune", "seed")}
        return {"space": {space.key: str(space) for space in self.spaces}, **plain}

    def limit(self, trials: int) -> int:
        """Return the number of trials: at most as many as the grid has."""
        if trials < 1:
            raise ForgeError(f"--trials is {trials}; it must be at least 1.")
        return min(trials, len(combinations(self.spaces))) if self.sampler == "grid" else trials


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

    def __init__(self, folder: Path, plan: SweepPlan, storage: str | None = None, identity: Sequence[str] = ()):
        self.folder, self.plan, self.is_shared = folder, plan, storage is not None
        self._optuna = optuna = import_optuna()
        self._mutex = threading.RLock()
        options = {"min_resource": 1, "reduction_factor": REDUCTION, "min_early_stopping_rate": 0}
        pruner = optuna.pruners.SuccessiveHalvingPruner(**options) if plan.prune else optuna.pruners.NopPruner()
        with self._alone():
            self._study: optuna.Study = optuna.create_study(
                study_name=folder.name,
                storage=storage or journal(optuna, folder / JOURNAL),
                direction="maximize" if plan.mode == "max" else "minimize",
                pruner=pruner,
                load_if_exists=True,
            )
            self._refuse_another({"target": list(identity), **plan.described()})

    def _refuse_another(self, described: dict[str, Any]) -> None:
        """Keep what the sweep is for beside its trials; refuse the trials of another sweep."""
        if not self._study.user_attrs:
            self._study.set_user_attr("plan", described)
        then = self._study.user_attrs.get("plan", {})
        for name, value in described.items():
            if then.get(name) != value:
                raise ForgeError(
                    f"{short_path(self.folder)} holds another sweep: its {name} is {then.get(name)!r}, not {value!r}. "
                    "Name another folder."
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
                    if now.state == running:
                        return self._claimed(self._optuna.trial.Trial(self._study, frozen._trial_id), lock)
                    lock.release()  # its process has just recorded its end
            if len(known) >= limit:
                return None
            trial = self._study.ask()
            lock = self._claim_lock(trial.number)
            lock.acquire()
            return self._claimed(trial, lock)

    def _claimed(self, trial: optuna.Trial, lock: RunLock) -> TrialClaim:
        values: dict[str, ParameterValue] = {}
        for place, space in enumerate(self.plan.spaces):  # what a killed process had chosen already stays
            self._study.sampler = self._sampler(trial.number, place)
            values[space.key] = space.suggest(trial)
        updates, pruned = trial.user_attrs.get("updates", []), "pruned" in trial.user_attrs
        overrides = [space.override(values[space.key]) for space in self.plan.spaces]
        return TrialClaim(trial, lock, values, overrides, list(updates), pruned)

    def _sampler(self, number: int, place: int) -> optuna.samplers.BaseSampler:
        """Return what chooses one value of a trial: its generator begins anew there, so that a kill changes nothing."""
        samplers, plan = self._optuna.samplers, self.plan
        seed = combine_seeds(plan.seed, number, place) % 2**32
        if plan.sampler == "grid":
            return samplers.PartialFixedSampler(combinations(plan.spaces)[number], samplers.RandomSampler(seed))
        if plan.sampler == "random":
            return samplers.RandomSampler(seed)
        return samplers.TPESampler(seed=seed, constant_liar=True)

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
                claim.trial.set_user_attr("pruned", f"{self.plan.metric} is {number_text(value)} at update {update}")
                claim.pruned = True
            return f"pruned: {claim.trial.user_attrs['pruned']}" if claim.pruned else ""

    def finish(self, claim: TrialClaim, value: float | None, reason: str = "") -> optuna.trial.FrozenTrial:
        """Record the end of a trial: with a value, pruned, or failed for a reason."""
        states = self._optuna.trial.TrialState
        if not reason and value is not None and not math.isfinite(value) and not claim.pruned:
            reason = f"{self.plan.metric} is {value}"
        with self._mutex:
            try:
                if reason:
                    claim.trial.set_user_attr("reason", reason)
                    return self._study.tell(claim.trial, state=states.FAIL)
                if claim.pruned:
                    return self._study.tell(claim.trial, state=states.PRUNED)
                return self._study.tell(claim.trial, value)
            finally:
                claim.lock.release()

    def leave(self, claim: TrialClaim) -> None:
        """Leave a trial for later: the next process of this sweep resumes it."""
        claim.lock.release()

    # -- read ---------------------------------------------------------------------------------------------------------

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return all trials, in order."""
        with self._mutex:
            return self._study.get_trials()

    def best(self) -> optuna.trial.FrozenTrial | None:
        """Return the best complete trial; of equal ones the earliest."""
        complete = [trial for trial in self.trials() if trial.state == self._optuna.trial.TrialState.COMPLETE]
        sign = -1.0 if self.plan.mode == "max" else 1.0
        return min(complete, key=lambda trial: (sign * (trial.value or 0.0), trial.number), default=None)

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
