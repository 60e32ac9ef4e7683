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

`Trainer._train` below is that loop. The defaults of its actions are in :mod:`forge.engine.default_actions`, the two
halves of a train step in :mod:`forge.contract.step`, evaluation in :mod:`forge.engine.evaluation`, the build and the
end of a run in :mod:`forge.engine.session`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch

from forge.checkpoint import check_savable, wait_until_written
from forge.config.arguments import Plugins, answers_foreign_arguments, resolve
from forge.config.recipe import Given, Recipe
from forge.config.trainer_defaults import GivenSettings, signature
from forge.contract.requests import SIGNAL
from forge.contract.run import Run
from forge.contract.stack import Stack
from forge.contract.step import Step
from forge.contract.task import TaskModule
from forge.data import Splits
from forge.data.accumulation_windows import batch_size, count_samples
from forge.data.sharding import Portion, RankWindow, rank_window
from forge.diagnose import checks
from forge.diagnose.running import keep_numbers
from forge.distributed.agreement import Agreement
from forge.distributed.consistency import refuse_different_windows
from forge.engine.session import Session
from forge.engine.signals import Signals
from forge.errors import RecipeError
from forge.metrics.means import PendingMeans
from forge.metrics.media import numbers_of
from forge.progress import Interval
from forge.rng import seed
from forge.runs import choose
from forge.snapshot.capture import capture
from forge.snapshot.restore import load_for, restore

logger = logging.getLogger("forge")

ALLOCATION = "allocation"
"""What a strategy provides that allocates the weights itself: the task is built on `meta`."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """The result of a fit."""

    updates: int
    epochs: int
    metrics: dict[str, float]
    "The latest value of every metric."
    stop_reason: str
    "Why it ended: max_epochs, max_updates, or who requested a stop and why."
    run_dir: Path | None


class Trainer(Run):
    """Trains, validates, tests and predicts with any stack of plugins.

    `recipe` names a stack (and may hold settings of the Trainer), or is one: a DictConfig, as `forge.recipe` gives it.
    `plugins` is merged over it. `plugins` alone is the whole stack (`[]`: nothing); with neither, the recipe "default"
    is used. Settings given here win over the recipe's.

    `resume="auto"` continues `run_dir` (without one: the newest run of the same job) from its newest valid
    checkpoint, and starts a new run where there is none. A path continues that run folder, or begins a new run from
    that one checkpoint. What cannot be continued exactly is refused by name unless `allow_inexact=True`.

    `seed` seeds the global generators of Python, numpy and torch when the Trainer is made, before a task draws its
    weights, and again when a fit begins. `seed=None` touches no generator.
    """

    def __init__(
        self,
        *,
        recipe: Given | None = None,
        plugins: Plugins | None = None,
        **given: Unpack[GivenSettings],
    ):
        self.recipe, settings, built = resolve(recipe, plugins, given)
        self.stack = Stack(built)
        self.has_plugins_in_code = plugins is not None
        self.settings = settings.as_data()
        self.max_epochs, self.max_updates = settings.max_epochs, settings.max_updates
        self.log_every, self.allow_inexact = settings.log_every, settings.allow_inexact
        self.seed, self.device, self.deterministic = settings.seed, settings.device, settings.deterministic
        self.resume = "auto" if settings.resume is True else settings.resume or None
        self.validate_every = Interval(settings.validate_every) if settings.validate_every else None
        self.wanted_run_dir, self.mesh = settings.run_dir, dict(settings.mesh or {})
        self.trace = self.instrument = None
        self.reset()
        if self.seed is not None:
            keep_numbers()
            seed(self.seed)  # the task is often made next, and draws its weights

    __signature__ = signature(recipe="str | Path | Mapping[str, Any] | Recipe | None", plugins="Plugins | None")

    def reset(self) -> None:
        super().reset()
        self._agreement: Agreement | None = None
        self._savable = False
        self._late_log: tuple[int, PendingMeans, dict[str, float]] | None = None

    def build(self) -> tuple[TaskModule, Splits]:
        """Build the task and the data that the recipe names: `task, data = trainer.build()`."""
        if not isinstance(self.recipe, Recipe):
            raise RecipeError("This Trainer has no recipe, so nothing names a task. Give it one: recipe='quickstart'.")
        allocates = any(ALLOCATION in plugin.provides for plugin in self.stack)
        with torch.device("meta") if allocates else nullcontext():
            task = self.recipe.make_task()
        return task, self.recipe.make_data(task)

    # -- the verbs ----------------------------------------------------------------------------------------------------

    @answers_foreign_arguments
    def fit(
        self, task: TaskModule, train: Any = None, val: Any = None, *, weights: str | Path | None = None
    ) -> FitResult:
        """Train `task` on `train`, validating on `val`: loaders, dicts of loaders, or `Splits` for both.

        A LightningAdapter makes the loaders that are left out, in the run; any other task needs `train`.

        `weights` is a file to start from. The trained weights end up in RUN/weights.safetensors.
        """
        checks.refuse_endless(self)
        with Signals(self) as signals, Session(self, "fit", task, {"train": train, "val": val}, weights):
            self._signals = signals
            self._validates = "val" in self.loaders
            self._agreement = Agreement(self) if self.env.world > 1 else None
            self._train()
            if not signals.interrupts or self.limit_reached is not None:
                self._finish()
            if signals.interrupts:
                raise signals.interruption(self._is_saved())
        reason = self.stop_reason or self.limit_reached or ""
        return FitResult(self.progress.update, self.progress.epoch, numbers_of(self.metrics), reason, self.run_dir)

    @answers_foreign_arguments
    def validate(self, task: TaskModule, val: Any = None, *, weights: str | Path | None = None) -> dict[str, Any]:
        """Run one validation and return its metrics."""
        return self._evaluate_only("validate", "val", task, val, weights)

    @answers_foreign_arguments
    def test(self, task: TaskModule, test: Any = None, *, weights: str | Path | None = None) -> dict[str, Any]:
        """Run one test and return its metrics."""
        return self._evaluate_only("test", "test", task, test, weights)

    @answers_foreign_arguments
    def predict(self, task: TaskModule, loader: Any = None, *, weights: str | Path | None = None) -> list[Any]:
        """Run `predict_step` on every batch and return the outputs, on the CPU."""
        return self._evaluate_only("predict", "predict", task, loader, weights)

    def _finish(self) -> None:
        """Log once more and export the weights. A run that had ended before it was resumed has logged already."""
        trained = self.progress.update != self.resumed_from
        self._log(self.optimizers.rates_used, publish=trained)
        self._deliver_log()
        if self.run_dir is not None:
            with self.env.no_timeout():
                self.hooks.forge_export(self, self.run_dir / "weights.safetensors")
        self.optimizers.finish()

    def _is_saved(self) -> bool:
        """Whether the state after the last update is on disk by now."""
        with self.env.no_timeout():
            wait_until_written()
        where = choose.checkpoints_of(self.run_dir) if self.run_dir is not None else None
        failed = where is not None and where.folder.is_dir() and not where.path(self.progress.update).exists()
        return self.saved_at == self.progress.update and not failed

    def _evaluate_only(self, verb: str, stage: str, task: TaskModule, loader: Any, weights: Any) -> Any:
        with Session(self, verb, task, {stage: loader}, weights):
            result = self.hooks.forge_evaluate(self, stage)
            if stage != "predict":
                self.log_metrics(self.progress.update, result)
        return result if stage == "predict" else numbers_of(result)

    # -- the rhythm ---------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        hooks, progress, optimizers, requests = self.hooks, self.progress, self.optimizers, self.requests
        several = self.env.world > 1
        if "stop" in requests.open:  # by a restored plugin: the run had been stopped before
            self.stop_reason = str(requests.grant("stop"))
        for step in self._steps():
            self.at_boundary = False
            if step.index in self.skipped_windows:
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
            progress.skipped += not step.updated
            if hooks.forge_step_end is not None:
                hooks.forge_step_end(step)
            progress.epoch += step.ends_epoch
            if self._late_log is not None:
                self._deliver_log()
            if progress.update % self.log_every == 0 or step.ends_epoch:
                self._log()
            if optimizers.has_schedules:
                optimizers.advance(step.updated, step.updated_names, step)
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

    def _steps(self) -> Iterator[Step]:
        """Windows as steps, epoch after epoch, until the run is done or a stop was granted."""
        feed, progress, clock = self.feed, self.progress, time.perf_counter
        hooks = self.hooks
        num_items = self.task.num_items if self.task_defines_num_items else batch_size
        divided = self.env.data_world > 1
        while self.stop_reason is None and self.limit_reached is None:
            asked, restores = clock(), self.restores
            for window, ends_epoch in feed.epoch(progress.epoch, lambda: hooks.forge_plan_step(self)):
                waited = clock() - asked
                items: list[Any] = []
                total = None
                if divided:
                    window, items, samples, total = self._rank_window(window, ends_epoch)
                else:
                    for batch in window:
                        items.append(num_items(batch))
                        if items[-1] is None:
                            items[-1] = self.task.num_items(batch)  # says what to define
                    samples = count_samples(window, items) if self.task_defines_num_items else sum(items)
                if not ends_epoch:
                    feed.samples += samples
                self.step = Step(self, "train", window, items, samples, ends_epoch, waited, total)
                yield self.step
                if self.stop_reason is not None or progress.update == self.max_updates or self.restores != restores:
                    break
                asked = clock()
            ended = self.stop_reason is not None or self.limit_reached is not None
            if ended and self.hooks.forge_save is not None and self.saved_at != progress.update:
                self._save()  # which may find that it must go back instead

    def _rank_window(self, portions: list[Portion], ends_epoch: bool) -> RankWindow:
        if self.feed.length is None:
            refuse_different_windows(self.env, len(portions), ends_epoch)
        self.padding = [not portion.samples for portion in portions]
        return rank_window(portions, self.env, self.task.num_items if self.task_defines_num_items else None)

    def _take_turns(self, step: Step) -> None:
        """Several optimizers: each trains its own parameters on the same window, in order."""
        for name in self.optimizers:
            assert name is not None
            resting = not any(p.requires_grad for p in self.optimizers.parameters(name))
            if not resting and self.task.takes_turn(name, step.index):
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
        self.log_metrics(self.progress.update, metrics)

    def _log(self, rates: dict[str, float] | None = None, publish: bool = True) -> None:
        """Read the interval's means. On an accelerator they are delivered after the next update, without waiting."""
        ends_epoch = self.step is not None and self.step.ends_epoch
        if self.means.empty and self.env.world == 1 and not ends_epoch:
            return
        pending = self.means.read(ends_epoch)
        if pending.empty:
            return
        if not publish:
            self.metrics |= {**pending.result(), **(rates or {})}
            return
        self._late_log = (self.progress.update, pending, rates or self.optimizers.learning_rates())
        if pending.here:
            self._deliver_log()

    def _deliver_log(self) -> None:
        if self._late_log is not None:
            (update, pending, rates), self._late_log = self._late_log, None
            self.log_metrics(update, {**pending.result(), **rates})

    def _grant_requests(self, step: Step) -> None:
        """Grant what was requested. On several ranks they agree first, at agreement points only."""
        if self._agreement is not None and self._agreement.due(step):
            self.agreed_time, self._skip_next = self._agreement.reach(self._skip_next)
        agreed = {kind for kind, asked in self.requests.open.items() if asked.everywhere or self.env.world == 1}
        if "rewind" in agreed:
            self._rewind()
            return
        if "checkpoint" in agreed or "stop" in agreed:
            asked = self.requests.grant("checkpoint")
            if self.hooks.forge_save is not None:
                self._save()
            elif asked:
                logger.warning("A checkpoint was requested, but no plugin of this stack saves one.")
        if "stop" in agreed:
            request = self.requests.grant("stop")
            self.stop_reason = str(request)
            self._signals.heard(request)

    def _save(self) -> None:
        """Hand the state to all plugins that save."""
        self._deliver_log()
        state = capture(self)
        if "rewind" in self.requests.open:  # a plugin that was asked for its state found that it must not be saved
            self._rewind()
            return
        self.saved_at = self.progress.update
        assert self.hooks.forge_save is not None  # called only where a plugin saves
        with self.env.no_timeout():
            self.hooks.forge_save(self, state)

    def _rewind(self) -> None:
        """Go back to the newest valid checkpoint of this run; other requests of this update are dropped."""
        request = self.requests.grant("rewind")
        for kind in ("checkpoint", "validation"):
            self.requests.grant(kind)
        stop = self.requests.open.get("stop")
        if stop is not None and stop.asker != SIGNAL:
            self.requests.grant("stop")
        self._late_log = None
        checkpoint = choose.newest(self)
        self.skipped_windows |= self._skip_next
        self._skip_next = set()
        restore(self, load_for(self, checkpoint), str(checkpoint.path))
        logger.warning("Back at update %d: %s", self.progress.update, request)
