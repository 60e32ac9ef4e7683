"""Session: one run of one verb, from a checked task to a closed stack.

Entering configures, builds and starts; leaving ends, after an error too. Nothing here is in the hot path, and a `with`
adds no frame between `fit` and the user's step.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack, nullcontext
from typing import Any

from forge import registry
from forge.checkpoint import StoredCheckpoint, check_savable, load_weights
from forge.contract import axes, modes
from forge.contract.frozen import refuse_without_values
from forge.contract.run import Run
from forge.contract.stack import TASK
from forge.contract.step import SECOND_PASS
from forge.contract.task import PHASES, Build, TaskCall, TaskModule, defines
from forge.data.accumulation_windows import Feed, check_loader
from forge.data.splits import by_stage, live_loaders
from forge.diagnose import checks
from forge.diagnose.deterministic import deterministic_flags
from forge.diagnose.explain import explain, first_cause, stop_watching
from forge.diagnose.running import running
from forge.distributed import consistency
from forge.distributed.rank_info import refuse_alone
from forge.engine.default_actions import Core
from forge.errors import ForgeError, Interrupted, TaskError
from forge.metrics import torchmetrics
from forge.metrics.means import Means
from forge.rng import seed_rank
from forge.runs import attempts, choose
from forge.runs.card import config_text, make_card, name_of, write_card, write_end
from forge.runs.folder import RunFolder
from forge.runs.lock import RunLock
from forge.snapshot import frozen_modules
from forge.snapshot.capture import capture
from forge.snapshot.restore import resume
from forge.util.files import absolute, share

logger = logging.getLogger("forge")


class Session:
    """`with Session(trainer, verb, task, loaders, weights): ...`"""

    def __init__(self, trainer: Run, verb: str, task: TaskModule, loaders: dict[str, Any], weights: Any = None):
        if trainer.verb is not None:
            raise ForgeError(f"This Trainer is running {trainer.verb} already; use another one for {verb}.")
        loaders = by_stage(loaders)
        checks.check_task(task, loaders)
        self.trainer, self.weights = trainer, choose.named_weights(trainer, weights, name_of(task))
        self.plugins = list(trainer.stack)
        self.outer_trainer = task.trainer
        self.checkpoint: StoredCheckpoint | None = None
        self.continues = False
        "Whether the checkpoint belongs to this run, rather than to one that it branches off."
        self.card: dict[str, Any] | None = None
        "The run card of a fit that has begun, on the rank that writes it."
        self.started = 0.0
        self.slept: modes.Asleep = {}
        "The modules that were in evaluation mode before a fit."
        self.cleanup = ExitStack()
        trainer.reset()
        trainer.verb, trainer.task, trainer.given_loaders = verb, task, loaders
        trainer.given_plugins = self.plugins
        trainer.said |= set(task.expected)

    def __enter__(self) -> None:
        self.trainer.task.trainer = self.trainer
        self.cleanup.enter_context(running(self.trainer))
        try:
            self._configure()
        except BaseException as error:
            self._close()
            explained = explain(self.trainer, error)
            if explained is error:
                raise
            raise explained from error
        try:
            self.cleanup.enter_context(deterministic_flags(self.trainer.deterministic))
            self._build()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Pass an error to every plugin, end every plugin, and raise the first cause."""
        trainer = self.trainer
        explained = first_cause(trainer, explain(trainer, error)) if error is not None else None
        if explained is not None:
            for name, observe in trainer.stack.implementations("forge_exception"):
                _shielded(explained, name, "forge_exception", lambda observe=observe: observe(trainer, explained))
        # a save that fails at the end outranks the signal that asked for it
        failed = None if isinstance(explained, Interrupted) else explained
        for name, end in reversed(trainer.stack.implementations("forge_end")):
            failed = _shielded(failed, name, "forge_end", lambda end=end: end(trainer))
        failed = failed or explained
        try:
            self._write_end(failed)
        finally:
            self._close()
            stop_watching(trainer)
        if failed is not error and failed is not None:
            raise failed from error

    def _close(self) -> None:
        self.trainer.verb = None  # whatever fails here, another run may begin
        self.cleanup.close()
        self.trainer.stack.reset(self.plugins)
        self.trainer.task.trainer = self.outer_trainer
        for given in self.trainer.given_loaders.values():
            for loader in live_loaders(given):
                loader.attach(self.trainer.task)

    # -- configure ----------------------------------------------------------------------------------------------------

    def _configure(self) -> None:
        """Resolve the stack, let plugins validate and change it, then freeze it."""
        trainer, stack = self.trainer, self.trainer.stack
        trainer.core = Core()
        config = trainer.recipe.config if trainer.recipe is not None else None
        asked: set[str] = set()
        while True:
            stack.resolve()
            stack.register(trainer.core, trainer.task)
            fresh = [(name, ask) for name, ask in stack.implementations("forge_configure") if name not in asked]
            if not fresh:
                break
            for name, ask in fresh:
                asked.add(name)
                ask(trainer, config)
        axes.refuse_unowned(trainer.mesh, stack.plugins)
        stack.lock()
        trainer.hooks = stack.freeze(trainer.trace, trainer.instrument)

    # -- build --------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        trainer = self.trainer
        trainer.env = trainer.hooks.forge_setup_env(trainer)
        if trainer.verb == "fit" and {"WORLD_SIZE", "SLURM_NTASKS"} & os.environ.keys():
            refuse_alone(trainer.env.world)
        trainer.means = Means(trainer.env.device, trainer.env)
        if trainer.env.world > 1:
            consistency.refuse_different_models(trainer)
            trainer.agreed_time = trainer.env.broadcast(time.monotonic())
        if self.weights is not None:
            self._load_weights()
        self._build_model()
        self._build_loaders()
        if trainer.env.world > 1:
            consistency.refuse_different_data(trainer)
            if trainer.verb == "fit":
                consistency.log_batch_per_rank(trainer)
        if trainer.verb == "fit":
            self._prepare_training()
            with trainer.env.no_timeout():
                self._open_run_dir()
        elif trainer.wanted_run_dir:
            trainer.run_dir = absolute(trainer.wanted_run_dir)
            trainer.progress = RunFolder(trainer.run_dir).counters
        self.started = time.monotonic()
        if trainer.hooks.forge_start is not None:
            trainer.hooks.forge_start(trainer)
        if trainer.verb == "fit":
            self._begin()

    def _load_weights(self) -> None:
        empty = [name for name, parameter in self.trainer.task.named_parameters() if parameter.is_meta]
        if empty:
            how = registry.advice("meta", " ({})")
            raise TaskError(
                f"The task was made on the meta device, so {empty[0]} has no memory yet to load weights into. Make the "
                f"task on the CPU{how} to start from weights."
            )
        load_weights(self.trainer.task, self.weights)

    def _build_model(self) -> None:
        trainer = self.trainer
        refuse_without_values(trainer.task)
        build = Build(trainer.task, TaskCall(trainer.task))
        if trainer.env.data_world > 1:
            torchmetrics.ignore_padding(trainer.task, build.model, self._is_padding)
        if trainer.verb == "fit":
            self.slept = modes.asleep(trainer.task)
            build.model.train()
            modes.rest(trainer.task, self.slept, [p for p in trainer.task.parameters() if p.requires_grad])
        for phase in PHASES:
            if trainer.hooks.forge_build_model is not None:
                trainer.hooks.forge_build_model(trainer, build, phase)
            if phase == "surgery":
                trainer.env.place(trainer.task)
        trainer.model = build.model

    def _is_padding(self) -> bool:
        """Whether the current micro-batch is a padding batch."""
        step = self.trainer.step
        return step is not None and self.trainer.padding[step.micro]

    def _build_loaders(self) -> None:
        trainer = self.trainer
        trainer.window = max(1, trainer.hooks.forge_plan_step(trainer))  # the feed refuses what is less, by name
        for stage in trainer.given_loaders:
            built = trainer.hooks.forge_build_loader(trainer, stage)
            if built is None and stage == "val" and trainer.verb == "fit":
                continue
            named: dict[str | None, Any] = built if isinstance(built, dict) else {None: built}
            for name, loader in named.items():
                check_loader(loader, stage if name is None else f"{stage}/{name}")
            trainer.loaders[stage] = named
            if stage == "train" and None in named:
                trainer.feed = Feed(named[None], trainer.allow_inexact)
                self._count_updates()  # before the loaders of validation are made, which may ask

    def _prepare_training(self) -> None:
        """Check the loaders, and prepare what the loop needs: the optimizers, what it keeps."""
        trainer, task = self.trainer, self.trainer.task
        checks.warn_of_near_misses(trainer)
        checks.refuse_unusable_loaders(trainer)
        checks.tell_of_inexact_data(trainer)
        trainer.optimizers = trainer.hooks.forge_build_optimizers(trainer)
        checks.check_optimizers(trainer.optimizers, task)
        self._settle_modes()
        checks.refuse_plateau_without_val(trainer)
        task.zero_grad(set_to_none=True)  # gradients from before the run do not count
        trainer.means.track(task)
        trainer.task_defines_num_items = defines(task, "num_items")
        needs_replay = any(entry.needs_closure for entry in trainer.optimizers.entries.values())
        trainer.keep_rng = needs_replay or self._owner_replays()
        trainer.keep_batches = trainer.keep_rng or len(trainer.optimizers) > 1

    def _settle_modes(self) -> None:
        """Leave in evaluation mode what trains nothing, now that it is known what is trained; say what is woken."""
        trainer, task = self.trainer, self.trainer.task
        modes.rest(task, self.slept, [p for p in trainer.optimizers.parameters(None) if p.requires_grad])
        names = modes.woken(task, self.slept)
        if names and trainer.env.is_main:
            text = "In eval mode, with parameters that are trained: %s. forge trains in train mode. To train in "
            text += "eval mode, call eval() in the task's forge_start."
            logger.info(text, ", ".join(names[:3]) + (", ..." if names[3:] else ""))

    def _count_updates(self) -> None:
        """Count the updates of an epoch and of the whole run, where known."""
        trainer = self.trainer
        planned = [] if trainer.max_updates is None else [trainer.max_updates]
        if trainer.feed.length is not None:
            trainer.updates_per_epoch = -(-trainer.feed.length // trainer.window)
            if trainer.max_epochs is not None:
                planned.append(trainer.max_epochs * trainer.updates_per_epoch)
        trainer.planned_updates = min(planned, default=None)

    def _owner_replays(self) -> bool:
        """Whether the owner of the train step, a plugin or the task, runs its window more than once."""
        stack, task = self.trainer.stack, self.trainer.task
        owners = [call.plugin for call in stack.calls()["forge_train_step"] if call.role == "own"]
        return any(SECOND_PASS in getattr(task if name == TASK else stack[name], "provides", ()) for name in owners)

    def _open_run_dir(self) -> None:
        """Choose the run folder, lock it, and find the checkpoint to continue from."""
        trainer, env = self.trainer, self.trainer.env
        choice = env.from_first(lambda: choose.choose(trainer, name_of(trainer.task)))
        trainer.run_dir = choice.run_dir
        if trainer.run_dir is not None:
            share(trainer.run_dir, with_group=trainer.settings["group_access"])
            self.cleanup.enter_context(RunLock(trainer.run_dir) if env.is_main else nullcontext())
        self.checkpoint = choose.find(choice, env)
        self.continues = choice.continues and self.checkpoint is not None

    def _begin(self) -> None:
        """Seed or restore, last before the loop. A state that cannot be saved is refused now."""
        trainer, env = self.trainer, self.trainer.env
        seed_rank(trainer.seed, env.seed_rank)
        if trainer.run_dir is not None or trainer.hooks.forge_save is not None:
            frozen_modules.begin(trainer.task)
        trainer.at_boundary = True
        if self.checkpoint is not None:
            checks.refuse_inexact_data(trainer)
            with env.no_timeout():
                resume(trainer, self.checkpoint)
        elif trainer.resume is not None:
            trainer.resumed_from = 0  # an attempt that died before its first checkpoint may have left logs
        checks.look_at_weights(trainer, resumes=self.checkpoint is not None)
        if trainer.hooks.forge_save is not None:
            check_savable(capture(trainer))
        self._write_card()

    def _write_card(self) -> None:
        """Write the run card and the recipe, once nothing can refuse the run."""
        trainer = self.trainer
        if trainer.run_dir is None or not trainer.env.is_main:
            return
        card = make_card(trainer, self.checkpoint.update if self.checkpoint else None)
        if self.continues:
            card["resume"] = RunFolder(trainer.run_dir).resume
        known = attempts.begin(card, trainer.run_dir, self.continues)
        self.card = card
        write_card(card, trainer.run_dir, attempts.as_markdown(known), config_text(trainer, card))

    def _write_end(self, error: BaseException | None) -> None:
        """Write how the fit ended; a failure to write it only logs an error."""
        if self.card is None:
            return
        try:
            write_end(self.trainer, self.card["started"], error, time.monotonic() - self.started)
        except Exception as problem:
            logger.error("end.json cannot be written: %s.", problem)


def _shielded(first: BaseException | None, name: str, hook: str, call: Any) -> BaseException | None:
    """Call a plugin without keeping others from their turn; return the first error."""
    try:
        call()
    except BaseException as error:
        error.add_note(f"forge: raised by plugin {name!r} in {hook}.")
        if first is None:
            return error
        logger.error("plugin %r failed in %s as well: %s: %s", name, hook, type(error).__name__, error)
    return first
