"""Run: what was asked for, what was built, and how far training is. `forge.Trainer` adds the verbs and the rhythm.

Hooks, tasks and every room below the engine type against this class; the object that they get is the Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from torch import nn

from forge.contract.dispatch import Hooks, Instrument
from forge.contract.plugin import Plugin, plugin_options
from forge.contract.requests import Requests
from forge.contract.stack import Stack
from forge.contract.step import Step
from forge.contract.task import TaskModule
from forge.data.accumulation_windows import Feed
from forge.env import Env
from forge.metrics.means import Means
from forge.metrics.media import publishable
from forge.optim.optimizers import Optimizers
from forge.options import flat
from forge.progress import Counters, Interval


class AnyRecipe(Protocol):
    """A recipe, as far as a run knows it."""

    name: str
    config: dict[str, Any]

    def to_yaml(self) -> str: ...


class Run:
    """One run of one verb, as plugins and tasks see it: attributes to read, metrics to publish, requests to make."""

    WRITABLE: ClassVar[frozenset[str]] = frozenset(
        str.split(
            "at_boundary max_epochs max_updates planned_updates recipe resume trace instrument mesh_axes means "
            "wanted_run_dir"
        )
    )
    """The attributes that code outside the engine may set; all others are read only."""

    # what was asked for
    recipe: AnyRecipe | None
    "The recipe that the run was made from, if any. Writable in forge_configure, by a plugin that changes the stack."
    settings: dict[str, Any]
    "The Trainer's settings as plain data, for the run card."
    stack: Stack
    "The plugins, in call order."
    has_plugins_in_code: bool
    "Whether `plugins=` was given in Python, beside or instead of a recipe."
    max_epochs: int | None
    "Epochs after which the run ends. Writable before a run."
    max_updates: int | None
    "Updates after which the run ends. Writable before a run."
    seed: int | None
    "The seed of the run, or None."
    device: str
    "The device as it was asked for; `env.device` is the one in use."
    deterministic: bool
    "Whether only deterministic algorithms are allowed."
    validate_every: Interval | None
    "How often a fit validates, or None."
    log_every: int
    "Updates between two logs."
    resume: str | Path | None
    'None, "auto", or the run folder or checkpoint to continue from. Writable before a run.'
    allow_inexact: bool
    "Whether a run that cannot be continued exactly is allowed."
    wanted_run_dir: str | Path | Literal[False] | None
    "The run folder as it was asked for; `run_dir` is the one in use. Writable before a run."
    trace: Callable[[str], Any] | None
    "Set to `print` to have pluggy trace every hook call of the next run."
    instrument: Instrument | None
    "Set to time hook implementations: called with each, it returns the function to call instead."

    # what was built
    task: TaskModule
    "The task that is trained or evaluated."
    model: nn.Module
    "The module that is called as `model(batch, stage, name)`: the task, with whatever a strategy wrapped around it."
    env: Env
    "Device, rank and reductions."
    core: Any
    "The defaults of all actions: `core.forge_forward` is the plain forward, without any plugin."
    hooks: Hooks
    "Every hook as one callable, with all plugins: `hooks.forge_forward(step, batch)`."
    optimizers: Optimizers
    "The optimizers by name, with their schedules."
    given_plugins: Sequence[Plugin]
    "The plugins as the run began, before any of them changed the stack."
    given_loaders: dict[str, Any]
    "What the user passed, by stage."
    loaders: dict[str, dict[str | None, Any]]
    "What is iterated, by stage and name."
    feed: Feed
    "The training loader's windows, and the position in them."
    means: Means
    "The running means of the training metrics. Writable in `forge_start`."
    mesh: dict[str, int]
    "The sizes of all axes of the device mesh as they were asked for; empty: by the plugins' options."
    mesh_axes: dict[str, int]
    "The sizes that plugins ask for along their axes, 0 for what is left: {'tensor': 2}. Writable in `forge_configure`."
    window: int
    "Micro-batches that the first window asks for."
    updates_per_epoch: int | None
    "Updates in an epoch, or None for a loader without a length."
    planned_updates: int | None
    "Updates that the run is planned for, or None if unknown. Writable before `forge_build_optimizers`."
    keep_batches: bool
    "Whether prepared batches are kept for the step: several optimizers, or a window that runs more than once."
    keep_rng: bool
    "Whether the state of the random generators is kept for each micro-batch, for replays."
    task_defines_num_items: bool
    "Whether the task defines `num_items` itself."

    # where the run is
    verb: str | None
    '"fit", "validate", "test" or "predict" while one runs, else None.'
    step: Step | None
    "The current training step; None before the first."
    eval_step: Step | None
    "The batch being evaluated, as a step; None outside evaluation."
    progress: Counters
    "Counters: updates, micro-batches, samples, epochs."
    requests: Requests
    "Open requests, and the log of all."
    metrics: dict[str, Any]
    "The latest value of every metric, those of earlier attempts of a resumed run included."
    logged: set[str]
    "Names of the metrics that this attempt has logged."
    run_dir: Path | None
    "The run folder, or None."
    resumed_from: int | None
    "The update at which the state was last restored, by `resume` or a rewind; 0 if there was nothing to resume."
    restores: int
    "Number of restores: a sink that sees it grow drops what it wrote after `resumed_from`."
    saved_at: int
    "The update whose state was last saved or restored; -1 before."
    skipped_windows: set[int]
    "Updates whose window is passed over without training, after a rewind."
    padding: list[bool]
    "On several ranks: which micro-batches of the window are padding batches."
    at_boundary: bool
    "Whether the run is between two updates, where its state can be captured."
    agreed_time: float | None
    "On several ranks, rank 0's clock at the last agreement; None on one rank."
    evaluated: int
    "Batches evaluated so far."
    stop_reason: str | None
    "Why a stop was granted, if one was."
    said: set[str]
    "Findings that were warned of in this run, and those that the task expects."

    def reset(self) -> None:
        """Forget the last run; every verb begins so."""
        self.verb = self.run_dir = self.step = self.eval_step = None
        self.updates_per_epoch = self.planned_updates = None
        self.progress = Counters()
        self.requests = Requests(self)
        self.metrics, self.given_loaders, self.loaders, self.logged = {}, {}, {}, set()
        self.given_plugins = ()
        self.resumed_from, self.restores, self.saved_at, self.skipped_windows = None, 0, -1, set()
        self.at_boundary, self.agreed_time, self.evaluated, self.stop_reason = False, None, 0, None
        self.mesh_axes, self.padding, self.said = {}, [], set()
        self._skip_next: set[int] = set()

    @property
    def hyperparameters(self) -> dict[str, bool | int | float | str]:
        """The options that can differ between runs, by their names in a recipe (`task.lr`, `plugin.option`)."""
        data = self.recipe.config.get("data") if self.recipe is not None else None
        acting = {plugin.name: plugin_options(plugin) for plugin in self.stack if not plugin.observer}
        return flat({"task": self.task.init_args, "data": data or {}, "trainer": self.settings, **acting})

    @property
    def limit_reached(self) -> str | None:
        """ "max_updates" or "max_epochs", once the run has reached that limit."""
        if self.max_updates is not None and self.progress.update >= self.max_updates:
            return "max_updates"
        return "max_epochs" if self.max_epochs is not None and self.progress.epoch >= self.max_epochs else None

    def publish(self, metrics: Mapping[str, Any]) -> None:
        """Hand numbers, or a `forge.Image`, `Text`, `Histogram` or `Embedding`, to every sink now, as of this update.

        Use it for what is made once or at an interval; a number of every update goes through `step.record`.
        """
        self.log_metrics(self.progress.update, {name: publishable(name, value) for name, value in metrics.items()})

    def log_metrics(self, update: int, metrics: dict[str, Any]) -> None:
        """Keep metrics as the latest and hand them to the sinks, as of an update."""
        self.metrics.update(metrics)
        self.logged.update(metrics)
        if metrics and self.hooks.forge_log is not None:
            self.hooks.forge_log(self, update, metrics)

    def replace_model(self, model: nn.Module) -> None:
        """Call another module from the next update on: for a strategy that rebuilds its wrapper."""
        self.model = model

    def switch_hooks(self, plugin: Plugin, *hooks: str, on: bool) -> None:
        """Call these hooks of a plugin no more from here on, or again: what has done its work costs nothing."""
        self.stack.switch(plugin.name, hooks, on)
        self.stack.freeze(self.trace, self.instrument, self.hooks, hooks)

    def mark_restored(self, metrics: Mapping[str, float], skipped_windows: Iterable[int]) -> None:
        """Note that the state of a checkpoint is in place."""
        self.metrics = dict(metrics)
        self.skipped_windows |= set(skipped_windows)
        self.resumed_from = self.saved_at = self.progress.update
        self.restores += 1

    # -- requests -----------------------------------------------------------------------------------------------------

    # On several ranks a request of one rank is granted to all at the next agreement point. With `everywhere=True` every
    # rank makes it at this very update, because it follows from counters or metrics: it is granted at once. `by` names
    # the plugin or task that asks; without it the calling function is named.

    def request_stop(self, reason: str, everywhere: bool = False, by: str = "") -> None:
        """End the run after this update; requested while a run is restored, before its first."""
        self.requests.add("stop", reason, everywhere, by)

    def request_validation(self, reason: str = "", everywhere: bool = False, by: str = "") -> None:
        """Validate after this update."""
        self.requests.add("validation", reason, everywhere, by)

    def request_checkpoint(self, reason: str = "", everywhere: bool = False, by: str = "") -> None:
        """Capture the state after this update and hand it to `forge_save`."""
        self.requests.add("checkpoint", reason, everywhere, by)

    def request_rewind(
        self, reason: str, leave_out: Iterable[int] = (), everywhere: bool = False, by: str = ""
    ) -> None:
        """Go back to the newest valid checkpoint after this update, and skip the windows of the updates `leave_out`."""
        self.requests.add("rewind", reason, everywhere, by)
        self._skip_next |= set(leave_out)
