"""Measure which levers make the step of a task faster, as whole updates on fresh copies of it.

::

    report = forge.tuning.speed_range(MyTask, lambda: train, numbers="rounding")
    print(report.speedup, report.change.plugins)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from forge import registry
from forge.config.arguments import Plugins
from forge.config.build import make_plugin
from forge.contract.plugin import plugin_options
from forge.contract.task import TaskModule
from forge.engine.default_actions import Core
from forge.engine.trainer import Trainer
from forge.errors import ForgeError
from forge.tuning.step_reading import StepReading, in_ms
from forge.tuning.step_timer import StepTimer, Weights
from forge.tuning.trial import run_trial
from forge.tuning.workers import available_cores
from forge.util import peak_memory
from forge.util.oom import is_out_of_memory
from forge.util.time_limit import TrialTooLong, time_limit
from forge_speed.levers import NUMBERS, Change, Lever, LeverSituation, Numbers, levers
from forge_speed.speed_report import SpeedReport
from forge_speed.speed_search import LeverFailed, SpeedSearch
from forge_speed.step_facts import LookingTimer, StepFacts
from forge_speed.torch_internals import stop_compilers

BUDGET = 10.0
"""Minutes of a search, unless told otherwise."""
GRACE = 20.0
"""Seconds that a trial may take even if the budget has fewer left."""


def speed_range(
    make_task: Callable[[], TaskModule],
    make_train: Callable[..., Any],
    *,
    numbers: Numbers = "precision",
    limit: float | None = None,
    budget: float = BUDGET,
    data: Mapping[str, Any] | None = None,
    leave_out: Collection[str] = (),
    tell: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    **trainer: Any,
) -> SpeedReport:
    """Find the fastest step: try each lever alone, add the winners, and compare the answer with the start.

    Every measurement gets a fresh task from `make_task`, the loader of `make_train(**changed options)`, and real
    updates. `numbers` says what may change in the results: "bitwise" nothing, "rounding" the last bits, "precision"
    everything. `limit` is a budget of memory in GB, of the device or of this process on a CPU; `budget` is one of time,
    in minutes. `data` are the options of the data with their values; without them the data stay. `leave_out` names
    plugins and levers that are not tried. `tell` is called with
    a line for each measurement. `trainer` are arguments of `forge.Trainer`: `recipe`, `plugins` (those that only
    observe, save or guard are left out of the trials), `seed`, `device`.
    """
    if numbers not in NUMBERS:
        raise ForgeError(f"numbers={numbers!r}: choose from {', '.join(NUMBERS)}.")
    for name, value in (("limit", limit), ("budget", budget)):
        if value is not None and not 0 < value < math.inf:
            raise ForgeError(f"{name}={value:g}: it must be above 0.")
    trials = StepTrials(make_task, make_train, **trainer)
    begun = clock()
    trials.time_left = lambda: begun + budget * 60 - clock()
    first = trials.look()
    found = trials.levers(data or {}, leave_out)
    tell(f"start: {in_ms(first.ms)} ms")
    search = SpeedSearch(
        trials,
        found,
        numbers=numbers,
        limit=None if limit is None else int(limit * 1e9),
        budget=budget * 60,
        clock=clock,
        tell=tell,
    )
    search.begun = begun
    return search.run(first)


class StepTrials:
    """Measure steps: each call trains a fresh task with some levers, and returns a StepReading."""

    def __init__(
        self,
        make_task: Callable[[], TaskModule],
        make_train: Callable[..., Any],
        *,
        plugins: Plugins = (),
        share: int = 1,
        without: Collection[str] = (),
        **trainer: Any,
    ):
        self.make_task, self.make_train = make_task, make_train
        self.plugins: Plugins = plugins if isinstance(plugins, Mapping) else list(plugins)
        self.trainer = {"seed": 0, **trainer}
        self.share, self.without = share, without
        self.facts = StepFacts()
        self.given = self._given()
        self.start: Weights = {}
        "The weights of the start after some updates."
        self.time_left: Callable[[], float] = lambda: math.inf
        self._costs: dict[str, float] = {}
        "The longest seconds of a trial with a lever."

    def look(self) -> StepReading:
        """Measure the start for the first time, and learn the facts about the step."""
        return self._run([], LookingTimer(self.share))

    def levers(self, data: Mapping[str, Any], leave_out: Collection[str]) -> list[Lever]:
        """Return every lever, those too that do not apply here; after a first look."""
        situation = LeverSituation(
            facts=self.facts,
            given=self.given,
            data=data,
            installed=registry.installed("plugin").keys(),
            leave_out=leave_out,
            cores=available_cores(),
        )
        return levers(situation)

    def __call__(self, chosen: Sequence[Lever]) -> StepReading:
        """Measure the step with these levers; raise LeverFailed if it does not work."""
        if not chosen:
            return self._run([], StepTimer(self.share))
        begun = time.monotonic()
        known = max(self._costs.get(lever.name, 0.0) for lever in chosen)
        allowed = max(self.time_left() / 2, GRACE, 2 * known)  # what has run before may run again
        try:
            with time_limit(allowed) if allowed < math.inf else nullcontext():
                reading = self._run(chosen, StepTimer(self.share))
        except Exception as error:
            late = isinstance(error, TrialTooLong) or time.monotonic() - begun >= allowed
            if late:
                stop_compilers()
            why_not = TrialTooLong.WORDS if late else reason(error)
            raise LeverFailed("out of memory" if is_out_of_memory(error) else why_not) from error
        finally:
            peak_memory.clean()
        for lever in chosen:
            self._costs[lever.name] = max(self._costs.get(lever.name, 0.0), time.monotonic() - begun)
        return reading

    def _run(self, chosen: Sequence[Lever], timer: StepTimer) -> StepReading:
        change = Change()
        for lever in chosen:
            change |= lever.change | lever.in_trials
        peak_memory.clean()
        plugins = with_change(self.plugins, change)
        self._refuse_stack(plugins)
        run_trial(
            timer,
            self.make_task,
            lambda: self.make_train(**change.data),
            updates=timer.most,
            without=self.without,
            **{**self.trainer, "plugins": plugins},
        )
        if isinstance(timer, LookingTimer):
            self.facts = timer.facts
        if not self.start:
            self.start = timer.weights
        return timer.reading(self.start)

    def _refuse_stack(self, plugins: Plugins) -> None:
        """Raise what the whole stack has against a lever, with the plugins that trials leave out."""
        stack = Trainer(plugins=plugins, **self.trainer).stack
        stack.resolve()
        stack.register(Core(), None)

    def _given(self) -> dict[str, Mapping[str, Any]]:
        """Return the plugins of the start by name, with the options that the user gave."""
        made = Trainer(plugins=self.plugins, **self.trainer)
        written = made.recipe.config.get("plugins", {}) if made.recipe is not None else {}
        in_code = self.plugins if isinstance(self.plugins, Mapping) else {}
        found: dict[str, Mapping[str, Any]] = {}
        for plugin in made.stack:
            named = {**written.get(plugin.name, {}), **(in_code.get(plugin.name) or {})}
            is_named = plugin.name in written or plugin.name in in_code
            found[plugin.name] = named if is_named else plugin_options(plugin)
        return found


def with_change(plugins: Plugins, change: Change) -> Plugins:
    """Return plugins, in the form in which they were given, with a change merged over them."""
    if isinstance(plugins, Mapping):
        merged: dict[Any, Any] = dict(plugins)
        for name, options in change.plugins.items():
            merged[name] = None if options is None else {**(merged.get(name) or {}), **options}
        return merged
    given: Iterable[Any] = plugins
    kept = [item for item in given if _name(item) not in change.plugins]
    return [*kept, *(make_plugin(name, o) for name, o in change.plugins.items() if o is not None)]


def _name(item: Any) -> str:
    return item if isinstance(item, str) else getattr(item, "name", "")


def reason(error: BaseException) -> str:
    """Return the first line of an error, with its type unless the message was written for users."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return first if isinstance(error, ForgeError) and first else f"{type(error).__name__}: {first}"
