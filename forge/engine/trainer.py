"""Trainer: owns the rhythm of a run and fires its hooks into the plugin stack.

The rhythm (every hook in its place: :mod:`forge.contract.hooks`)::

    configure -> setup_env -> build_model -> build_loader -> build_optimizers -> start -> restore
    until done or a stop was agreed:
        window = the next micro-batches                     forge_plan_step says how many
        train_step:  for each micro-batch: prepare, forward, record, backward(weighted loss)
                     finalize, inspect, edit gradients; optimizer step; zero_grad
        update += 1; step_end; log if due; schedules
        validation if due or requested
        boundary; capture and save if requested, at a stop and at the end
    on error: exception, then re-raise                      always: end

`Trainer._train` below is that loop. The defaults of its actions are in :mod:`forge.engine.defaults`, the two halves of
a train step in :mod:`forge.contract.step`, evaluation in :mod:`forge.engine.evaluation`, the build and the end of a run
in :mod:`forge.engine.session`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from forge.checkpoint import check_savable, settle
from forge.contract.dispatch import Hooks, Instrument
from forge.contract.plugin import Plugin
from forge.contract.requests import KINDS, Requests
from forge.contract.stack import Stack, make_plugins
from forge.contract.step import Step
from forge.contract.task import TaskModule
from forge.data.sharding import Portion
from forge.data.windows import Feed, batch_size, count_samples
from forge.engine.defaults import Core
from forge.engine.session import Session
from forge.engine.signals import Signals
from forge.env import Env
from forge.errors import DataError, ForgeError, StackError, did_you_mean
from forge.metrics.means import Means, PendingMeans
from forge.metrics.media import publishable
from forge.optim.optimizers import Optimizers
from forge.progress import Interval, Progress
from forge.runs import choose
from forge.snapshot.capture import capture
from forge.snapshot.restore import load_for, restore

if TYPE_CHECKING:
    from forge.config import Recipe

logger = logging.getLogger("forge")

AGREE_WITHIN = 2.0
"""Seconds between two agreements of several ranks, about: so long may a signal wait, beside the update under way."""

Plugins = Iterable[Plugin | type[Plugin] | str] | Mapping[str, Mapping[str, Any] | None]

LIGHTNING = {
    "max_steps": "max_updates",
    "log_every_n_steps": "log_every",
    "val_check_interval": "validate_every",
    "check_val_every_n_epoch": "validate_every",
    "accelerator": "device",
    "callbacks": "plugins",
    "logger": "plugins",
}
"""What arguments of Lightning's Trainer are called here; docs/from-lightning.md has all of them."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """What a fit came to."""

    updates: int
    epochs: int
    metrics: dict[str, float]
    "The latest value of every metric."
    stop_reason: str
    "Why it ended: max_epochs, max_updates, or who asked for a stop and why."
    run_dir: Path | None


Init = TypeVar("Init", bound=Callable[..., None])


def _settings_from_recipe(init: Init) -> Init:
    """What is not passed comes from the recipe's `trainer` section."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def with_recipe(self: Trainer, **given: Any) -> None:
        for name in (name for name in given if name not in known):
            hint = f" Did you mean {LIGHTNING[name]}?" if name in LIGHTNING else did_you_mean(name, [*known][1:])
            raise TypeError(f"forge.Trainer takes no argument {name!r}.{hint}")
        recipe = given.get("recipe")
        if recipe is None and given.get("plugins") is None:
            recipe = "default"
        if isinstance(recipe, (str, Path)):
            from forge.config import load_recipe

            recipe = load_recipe(recipe)
        if recipe is not None:
            explicit = {key: value for key, value in given.items() if key not in ("recipe", "plugins", "run_dir")}
            recipe = recipe.with_trainer(explicit)
            given = {**recipe.trainer, **given}
        init(self, **{**given, "recipe": recipe})

    return with_recipe  # pyright: ignore[reportReturnType]


class Trainer:
    """Trains, validates, tests and predicts with any stack of plugins.

    `recipe` names a stack (and may hold Trainer settings); `plugins` is merged over it. `plugins` alone is the whole
    stack (`[]`: nothing); with neither, the recipe "default" is used.

    `resume="auto"` continues `run_dir` (without one: the newest run of this task or recipe) from its newest valid
    checkpoint, and starts a new run where there is none. A path continues that run folder, or begins a new run from
    that one checkpoint. What cannot be continued exactly is refused by name unless `allow_inexact=True`.
    """

    # what was asked for
    recipe: Recipe | None
    stack: Stack
    settings: dict[str, Any]
    # what was built
    task: TaskModule
    model: nn.Module
    env: Env
    core: Core
    hooks: Hooks
    optimizers: Optimizers
    given_loaders: dict[str, Any]
    loaders: dict[str, dict[str | None, Any]]
    feed: Feed
    updates_per_epoch: int | None
    planned_updates: int | None
    # where the run is
    verb: str | None
    step: Step | None
    progress: Progress
    means: Means
    requests: Requests
    metrics: dict[str, Any]
    run_dir: Path | None
    resumed_from: int | None
    "The update that this run was last restored at, by `resume` or by a rewind; 0 where there was nothing to resume."
    restores: int
    "How often that happened: a sink that sees it grow drops what it wrote after `resumed_from`."
    left_out: set[int]
    "Updates whose window is passed over without training, after a rewind."
    at_boundary: bool
    "Whether the run is between two updates, where its state can be captured."
    agreed_time: float | None
    "On several ranks the clock of rank 0 at the last agreement; None on one, where every clock is right."
    evaluated: int
    "Batches evaluated so far: with the counters of progress it tells that a run is alive."
    window: int
    "Micro-batches that the first window asks for."
    borrowing: bool = False
    "Whether the batch that is evaluated now belongs to another rank; tasks ask `self.borrowed`."
    borrowed: list[bool]
    "On several ranks, which micro-batches of the window belong to another rank, and run here for company only."
    # set by the session: what the loop needs to know of the task
    keep_batches: bool
    keep_rng: bool
    weighs_by_itself: bool

    @_settings_from_recipe
    def __init__(
        self,
        *,
        max_epochs: int | None = None,
        max_updates: int | None = None,
        seed: int | None = None,
        recipe: str | Path | Recipe | None = None,
        plugins: Plugins | None = None,
        run_dir: str | Path | Literal[False] | None = None,
        device: str = "auto",
        validate_every: str | None = "1 epoch",
        log_every: int = 50,
        resume: str | Path | bool | None = None,
        deterministic: bool = False,
        allow_inexact: bool = False,
    ):
        self.recipe = recipe  # pyright: ignore[reportAttributeAccessIssue]
        self.stack = Stack(_stack_plugins(self.recipe, plugins))
        self.plugins_in_code = plugins is not None
        self.max_epochs = _at_least("max_epochs", max_epochs, 1)
        self.max_updates = _at_least("max_updates", max_updates, 1)
        self.log_every = _at_least("log_every", log_every, 1)
        self.seed = None if seed is None else int(seed)
        self.device, self.deterministic = str(device), deterministic
        self.resume: str | Path | None = "auto" if resume is True else resume or None
        self.allow_inexact = allow_inexact
        self.validate_every = Interval(validate_every) if validate_every else None
        self.trace: Callable[[str], Any] | None = None
        "Set to `print`, say, to have pluggy trace every hook call of the next run."
        self.instrument: Instrument | None = None
        "Set to time implementations: given one, returns the function to call in its place."
        self.settings = {
            "max_epochs": max_epochs,
            "max_updates": max_updates,
            "seed": self.seed,
            "device": self.device,
            "validate_every": str(self.validate_every) if self.validate_every else None,
            "log_every": log_every,
            "deterministic": deterministic,
        }
        self.wanted_run_dir = run_dir
        self.reset()

    def reset(self) -> None:
        """Forget the last run; every verb begins so."""
        self.verb = self.run_dir = self.step = None
        self.updates_per_epoch = self.planned_updates = None
        self.progress = Progress()
        self.requests = Requests(self)
        self.metrics, self.given_loaders, self.loaders = {}, {}, {}
        self.logged: set[str] = set()
        "Names that this life of the run has logged itself; `metrics` has those of the lives before it too."
        self.resumed_from, self.restores, self.left_out = None, 0, set()
        self.at_boundary = False
        self.mesh_axes: dict[str, int] = {}
        "Inner dimensions of the device mesh, set in forge_configure by who needs them: {'tensor': 2}."
        self.agreed_time, self.evaluated = None, 0
        self._agree_at = 1
        self._agreed_at: tuple[int, float] | None = None
        self._saved_at = -1
        self._savable = False
        self._leave_out_next: set[int] = set()
        self._late_log: tuple[int, PendingMeans, dict[str, float]] | None = None
        self._stop_reason: str | None = None

    # -- the verbs ----------------------------------------------------------------------------------------------------

    def fit(self, task: TaskModule, train: Any, val: Any = None, *, weights: str | Path | None = None) -> FitResult:
        """Train `task` on `train`, validating on `val` (a loader, or a dict of loaders by name).

        `weights` is a file to start from. The trained weights end up in RUN/weights.safetensors.
        """
        if self.max_epochs is None and self.max_updates is None:
            raise ForgeError("Neither max_epochs nor max_updates is set: say how long to train.")
        with Signals(self) as signals, Session(self, "fit", task, {"train": train, "val": val}, weights):
            self._signals = signals
            self._validates = "val" in self.loaders
            stop_reason = self._train()
            if not signals.interrupts or self._end is not None:
                self._finish()
            if signals.interrupts:
                raise signals.interruption(self._is_saved())
        numbers = {name: float(value) for name, value in self.metrics.items() if isinstance(value, (int, float))}
        return FitResult(self.progress.update, self.progress.epoch, numbers, stop_reason, self.run_dir)

    def validate(self, task: TaskModule, val: Any, *, weights: str | Path | None = None) -> dict[str, Any]:
        """One validation: its metrics."""
        return self._evaluate_only("validate", "val", task, val, weights)

    def test(self, task: TaskModule, test: Any, *, weights: str | Path | None = None) -> dict[str, Any]:
        """One test: its metrics."""
        return self._evaluate_only("test", "test", task, test, weights)

    def predict(self, task: TaskModule, loader: Any, *, weights: str | Path | None = None) -> list[Any]:
        """`predict_step` on every batch: a list of outputs, on the CPU."""
        return self._evaluate_only("predict", "predict", task, loader, weights)

    def _finish(self) -> None:
        """The last log and the weights alone. A run that had ended before this life has logged it already."""
        trained = self.progress.update != self.resumed_from
        self._log(self.optimizers.rates_used, tell=trained)
        self._deliver_log()
        if self.run_dir is not None:
            with self.env.patience():
                self.hooks.forge_export(self, self.run_dir / "weights.safetensors")

    def _is_saved(self) -> bool:
        """Whether the state after the last update is on disk by now."""
        with self.env.patience():
            settle()
        where = choose.checkpoints_of(self.run_dir) if self.run_dir is not None else None
        failed = where is not None and where.folder.is_dir() and not where.path(self.progress.update).exists()
        return self._saved_at == self.progress.update and not failed

    def _evaluate_only(self, verb: str, stage: str, task: TaskModule, loader: Any, weights: Any) -> Any:
        with Session(self, verb, task, {stage: loader}, weights):
            result = self.hooks.forge_evaluate(self, stage)
            if stage != "predict":
                self._publish(self.progress.update, result)
        return result

    # -- for plugins and tasks ---------------------------------------------------------------------------------------

    def publish(self, metrics: Mapping[str, Any]) -> None:
        """Hand numbers, or a `forge.Image`, `Text`, `Histogram` or `Embedding`, to every sink now, as of this update.

        For what is made once or at an interval; a number of every update goes through `step.record`.
        """
        self._publish(self.progress.update, {name: publishable(name, value) for name, value in metrics.items()})

    def replace_model(self, model: nn.Module) -> None:
        """Run this from the next update on: for a strategy whose wrapper must be made anew."""
        self.model = model
        self.core.direct = None

    # -- requests, for plugins and tasks ------------------------------------------------------------------------------

    # On several ranks a request of one of them is granted to all at the next agreement point. `everywhere=True` says
    # that every rank asks at this very update, since it follows from counters or from metrics: it is granted at once.

    def request_stop(self, reason: str, everywhere: bool = False) -> None:
        """End the run after this update; asked while a run is restored, before its first."""
        self.requests.add("stop", reason, everywhere)

    def request_validation(self, reason: str = "", everywhere: bool = False) -> None:
        """Validate after this update, or the next when asked at a boundary."""
        self.requests.add("validation", reason, everywhere)

    def request_checkpoint(self, reason: str, everywhere: bool = False) -> None:
        """Capture the run's state at the end of this update and hand it to `forge_save`."""
        self.requests.add("checkpoint", reason, everywhere)

    def request_rewind(self, reason: str, leave_out: Iterable[int] = (), everywhere: bool = False) -> None:
        """Go back to the newest valid checkpoint after this update, and pass over these updates' windows then."""
        self.requests.add("rewind", reason, everywhere)
        self._leave_out_next |= set(leave_out)

    # -- the rhythm ---------------------------------------------------------------------------------------------------

    def _train(self) -> str:
        hooks, progress, optimizers, requests = self.hooks, self.progress, self.optimizers, self.requests
        several = self.env.world > 1
        if "stop" in requests.open:  # asked for by what was restored: the run had been stopped before this life
            self._stop_reason = str(requests.grant("stop"))
        for step in self._steps():
            self.at_boundary = False
            if step.index in self.left_out:
                step.skip_reason = "left out after a rewind"
            elif optimizers.named:
                self._take_turns(step)
            else:
                hooks.forge_train_step(step)
            for parameter in optimizers.orphans:
                parameter.grad = None

            progress.update += 1
            progress.micro += len(step.window)
            progress.sample += step.samples
            if not step.updated:
                progress.skipped += 1
            if hooks.forge_step_end is not None:
                hooks.forge_step_end(step)
            if step.ends_epoch:
                progress.epoch += 1
            if self._late_log is not None:
                self._deliver_log()
            if progress.update % self.log_every == 0 or step.ends_epoch:
                self._log()
            if optimizers.has_schedules:
                optimizers.advance(step)
            if self._validates and self._validation_due(step):
                self._validate()
            if hooks.forge_boundary is not None:
                hooks.forge_boundary(self, step)
            self.at_boundary = True
            if not self._savable and step.updated and hooks.forge_save is not None:
                check_savable(capture(self))  # optimizers have their state now: better refused here than in an hour
                self._savable = True
            if requests.open or several:
                self._grant_requests(step)
        return self._stop_reason or self._end or ""

    def _steps(self) -> Iterator[Step]:
        """Windows as steps, epoch after epoch, until the run is done or a stop was granted."""
        feed, progress, clock = self.feed, self.progress, time.perf_counter
        owned = self.hooks.forge_plan_step != self.core.forge_plan_step
        plan = functools.partial(self.hooks.forge_plan_step, self) if owned else itertools.repeat(1).__next__
        num_items = self.task.num_items if self.weighs_by_itself else batch_size
        divided = self.env.shares > 1
        while self._stop_reason is None and self._end is None:
            asked, restores = clock(), self.restores
            for window, ends_epoch in feed.epoch(progress.epoch, plan):
                waited = clock() - asked
                items: list[Any] = []
                total = None
                if divided:
                    window, items, samples, total = self._own_window(window, ends_epoch)
                else:
                    for batch in window:
                        items.append(num_items(batch))
                        if items[-1] is None:
                            items[-1] = self.task.num_items(batch)  # refuses, and says what to define
                    samples = count_samples(window, items) if self.weighs_by_itself else sum(items)
                if not ends_epoch:
                    feed.samples += samples
                self.step = Step(self, "train", window, items, samples, ends_epoch, waited, total)
                yield self.step
                if self._stop_reason is not None or progress.update == self.max_updates or self.restores != restores:
                    break
                asked = clock()
            ended = self._stop_reason is not None or self._end is not None
            if ended and self.hooks.forge_save is not None and self._saved_at != progress.update:
                self._save()  # which may find that it must go back instead

    def _own_window(self, portions: list[Portion], ends_epoch: bool) -> tuple[list[Any], list[Any], int, Any]:
        """A window on one of several ranks: its batches, their weights, and samples and weights over all ranks.

        Sample counts are known by arithmetic; only a task's own `num_items` must be asked of the other ranks.
        """
        if self.feed.length is None:
            from forge.distributed.consistency import refuse_different_windows

            refuse_different_windows(self.env, len(portions), ends_epoch)
        batches, samples = [portion.batch for portion in portions], sum(portion.total for portion in portions)
        self.borrowed = [not portion.samples for portion in portions]
        if not self.weighs_by_itself:
            for portion in portions:
                _refuse_other_size(portion)
            return batches, [portion.samples for portion in portions], samples, samples
        env = self.env
        items = [self.task.num_items(portion.batch) if portion.samples else 0 for portion in portions]
        here = env.device.type == "cpu"
        kind = torch.float64 if here else torch.float32  # on the host there is no reason to round what was given
        own = torch.stack([torch.as_tensor(n, dtype=kind).reshape(()) for n in items]).to(env.device, non_blocking=True)
        total = env.sum(own.sum()) * env.shares / env.world
        if here:  # nothing to divide by: what one process makes of it
            return batches, own.tolist(), samples, float(total) or None
        return batches, list(own), samples, total.clamp(min=1e-30)  # 0 items weigh 0, and not 0/0

    @property
    def _end(self) -> str | None:
        """The limit that the run has reached, if any."""
        if self.max_updates is not None and self.progress.update >= self.max_updates:
            return "max_updates"
        return "max_epochs" if self.max_epochs is not None and self.progress.epoch >= self.max_epochs else None

    def _take_turns(self, step: Step) -> None:
        """Several optimizers: each trains its own parameters on the same window, in order."""
        for name in self.optimizers:
            assert name is not None
            rests = not any(p.requires_grad for p in self.optimizers.parameters(name))
            if not rests and self.task.takes_turn(name, step.index):
                step.begin_turn(name)
                with self.optimizers.only(name):
                    self.hooks.forge_train_step(step)
                if step.updated:
                    step.updated_names += (name,)
        step.begin_turn(None)
        step.updated = bool(step.updated_names)

    # -- around the steps ---------------------------------------------------------------------------------------------

    def _validation_due(self, step: Step) -> bool:
        due = self.validate_every is not None and self.validate_every.due(step)
        asked = self.requests.open.get("validation")
        return due or (asked is not None and (asked.everywhere or self.env.world == 1))

    def _validate(self) -> None:
        self.requests.grant("validation")
        self._deliver_log()  # logs arrive in the order of their updates
        metrics = self.hooks.forge_evaluate(self, "val")
        self.optimizers.after_validation(metrics)
        self._publish(self.progress.update, metrics)

    def _log(self, rates: dict[str, float] | None = None, tell: bool = True) -> None:
        """Read the interval's means. On an accelerator they are delivered after the next update, without waiting."""
        if self.means.empty and self.env.world == 1:
            return
        pending = self.means.read()
        if pending.empty:
            return
        if not tell:
            self.metrics |= {**pending.result(), **(rates or {})}
            return
        self._late_log = (self.progress.update, pending, rates or self.optimizers.learning_rates())
        if pending.here:
            self._deliver_log()

    def _deliver_log(self) -> None:
        if self._late_log is not None:
            (update, pending, rates), self._late_log = self._late_log, None
            self._publish(update, {**pending.result(), **rates})

    def _publish(self, update: int, metrics: dict[str, Any]) -> None:
        self.metrics.update(metrics)
        self.logged.update(metrics)
        if metrics and self.hooks.forge_log is not None:
            self.hooks.forge_log(self, update, metrics)

    def _grant_requests(self, step: Step) -> None:
        """Across ranks requests are agreed at agreement points only; on one rank every update is one."""
        if self.env.world > 1 and self._agreement_due(step):
            self._agree()
        agreed = {kind for kind, asked in self.requests.open.items() if asked.everywhere or self.env.world == 1}
        if "rewind" in agreed:
            self._rewind()
            return
        if "checkpoint" in agreed or "stop" in agreed:
            asked = self.requests.grant("checkpoint")
            if self.hooks.forge_save is not None:
                self._save()
            elif asked:
                logger.warning("A checkpoint was asked for, but nothing in this stack saves one.")
        if "stop" in agreed:
            request = self.requests.grant("stop")
            self._stop_reason = str(request)
            self._signals.heard(request)

    def _agreement_due(self, step: Step) -> bool:
        """Every log, every end of an epoch, and often enough in between that a signal is heard in time."""
        update = self.progress.update
        return step.ends_epoch or update % self.log_every == 0 or update >= self._agree_at

    def _agree(self) -> None:
        """Make what any rank asks for the wish of all, and take over the clock of rank 0."""
        env, requests, now = self.env, self.requests, time.monotonic()
        spent = now - (self._agreed_at[1] if self._agreed_at else now)
        done = self.progress.update - (self._agreed_at[0] if self._agreed_at else 0)
        gap = max(1, min(self.log_every, 2 * done, int(AGREE_WITHIN * done / spent) if spent else 1))
        self._agreed_at = (self.progress.update, now)
        asked = [int(kind in requests.open) for kind in KINDS]
        *wanted, clock, gap = env.agree([*asked, *((int(now * 1000), gap) if env.is_main else (0, 0))])
        self.agreed_time, self._agree_at = clock / 1000, self.progress.update + gap
        if any(wanted):
            requests.agree(env.gather(requests.as_data()))
            self._leave_out_next = set().union(*env.gather(sorted(self._leave_out_next)))

    def _save(self) -> None:
        self._deliver_log()
        state = capture(self)
        if "rewind" in self.requests.open:  # a plugin that was asked for its state found that it must not be saved
            self._rewind()
            return
        self._saved_at = self.progress.update
        assert self.hooks.forge_save is not None  # asked for only where somebody saves
        with self.env.patience():
            self.hooks.forge_save(self, state)

    def _rewind(self) -> None:
        """Back to the newest valid checkpoint of this run; what else was asked for at this update is void."""
        request = self.requests.grant("rewind")
        for kind in ("checkpoint", "validation"):
            self.requests.grant(kind)
        stop = self.requests.open.get("stop")
        if stop is not None and stop.asker in self.stack:  # a signal's holds
            self.requests.grant("stop")
        self._late_log = None
        checkpoint = choose.newest(self)
        self.left_out |= self._leave_out_next
        self._leave_out_next = set()
        restore(self, load_for(self, checkpoint), str(checkpoint.path))
        logger.warning("Back at update %d: %s", self.progress.update, request)


def _stack_plugins(recipe: Recipe | None, given: Plugins | None) -> list[Plugin]:
    """The recipe's plugins with `given` merged over them."""
    base: dict[str, Any] = dict(recipe.plugins) if recipe is not None else {}
    if given is None:
        return make_plugins(base)
    if isinstance(given, Mapping):
        for name, values in given.items():
            assert isinstance(name, str)
            if values is None and name not in base:
                raise StackError(f"plugins={{{name!r}: None}} removes nothing.{did_you_mean(name, base)}")
            base[name] = {**base.get(name, {}), **values} if isinstance(values, Mapping) else values
        return make_plugins(base)
    own = make_plugins(given)
    names = {plugin.name for plugin in own}
    return [plugin for plugin in make_plugins(base) if plugin.name not in names] + own


def _refuse_other_size(portion: Portion) -> None:
    """What counts on several ranks is known by arithmetic, so a batch must have as many samples as were read for it."""
    size = batch_size(portion.batch)
    if size is not None and portion.samples and size != portion.samples:
        raise DataError(
            f"A batch of {portion.samples} samples came out of its collate_fn with {size}: on several ranks forge "
            "cannot tell how the others' count. Say it yourself: define num_items(batch) on the task, as in "
            "`return len(batch[0])`."
        )


def _at_least(name: str, value: Any, least: int) -> Any:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ForgeError(f"{name}={value!r}: it must be a whole number of at least {least}.")
    return value
