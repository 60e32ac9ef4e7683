"""Plugin: the base class of every plugin, built in or third-party; and `@forge.on`, the smallest plugin."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from forge import options
from forge.contract.hooks import hookimpl
from forge.errors import RecipeError, StackError, did_you_mean
from forge.progress import Interval

if TYPE_CHECKING:
    from forge.contract.step import Step
    from forge.contract.task import TaskModule


EFFECTS = {
    "evaluates": "It evaluates the task.",
    "files": "It writes files in the run folder.",
    "reads_ahead": "It reads samples before they are trained on; its option `depth` says how many batches.",
    "state_dict": "It calls `state_dict` of the task and its optimizers.",
}
"""What an observer may declare as its work."""


@dataclass(kw_only=True, slots=True)
class NoOptions:
    """The Config of a plugin without options."""


class Plugin:
    """A set of hook implementations with typed options.

    Subclasses may define a nested dataclass `Config`, the declarations below, and methods named after hooks (see
    :mod:`forge.contract.hooks`) marked with `@forge.hookimpl`. Every option can be given by name, the first one also by
    position: `Noise(0.5)`, `Noise(scale=0.5)`. An instance drops a hook of its class by `self.<hook> = None` in
    `__init__`; ownership and `provides` are per instance.

    forge knows no plugin by name: planning, tuning, reports and messages ask what the installed ones declare. Write
    declarations as literals in the body of the class, where they are read without importing it.
    """

    Config: ClassVar[type[Any]] = NoOptions
    """The options, a keyword-only dataclass; a string under a field describes it."""

    provides: tuple[str, ...] = ()
    """What this plugin adds to a run; two plugins that provide the same thing are refused. forge itself asks for a few
    things, which docs/writing-plugins.md lists."""
    requires: tuple[str, ...] | Mapping[str, str] = ()
    """Names, or things provided, that must be in the stack too; a mapping gives each a sentence that names the fix."""
    conflicts: tuple[str, ...] | Mapping[str, str] = ()
    """Names, or things provided, that cannot be in the same stack. A mapping gives each a sentence that names the fix:
    `{"grad_scaler": "Use bf16, which needs none."}`."""
    axes: Mapping[str, str] = {}
    """Axes of the mesh of processes that it owns, and what their ranks divide, in words of `forge.contract.axes.KINDS`:
    `{"shard": "samples weights"}`. A strategy, which averages gradients, says under `*` what other plugins may divide
    along axes of their own: `{"data": "samples", "*": "positions"}`."""
    before: tuple[str, ...] = ()
    """Come before (outside of) these in the stack."""
    after: tuple[str, ...] = ()
    """Come after (inside of) these in the stack."""
    observer: bool = False
    """Promises never to change the run: weights stay bit-identical with and without it, and the user's code (methods,
    hooks, data, generators, files, environment) sees what it sees without it, but for `effects`."""
    effects: tuple[str, ...] = ()
    """What the user's code may notice of an observer, because it is its work; names of `EFFECTS`."""
    capturable: bool | str = False
    """Promises that its step hooks may run inside a CUDA graph; "window": only those up to the backward pass."""
    charts: Mapping[str, str] = {}
    """Charts of the metrics that it logs: `section/title` to a regular expression of their names."""
    cures: Mapping[str, str] = {}
    """What to do about problems, for the messages of forge, with its name as {name}:
    `{"memory": "-p {name}, which keeps less"}`. A key is a problem that it helps with, as docs/writing-plugins.md lists
    them, or several words in lower case of an error that it causes."""
    example: Mapping[str, Any] | None = None
    """Options with which it acts in a short fit, if the conformance kit is to run other plugins beside it."""

    name: str
    """The recipe key, or the class name in snake case."""
    config: Any
    """The checked options, an instance of the nested Config."""

    def __init__(self, *first: Any, **values: Any):
        kind = type(self)
        self.name = snake_case(kind.__name__)
        known = options.of_config(kind.Config)
        if len(first) > 1 or (first and not known):
            takes = "only its first option by position" if known else "no options"
            raise RecipeError(f"{kind.__name__} takes {takes}; write the others by name.")
        if first and known[0].name in values:
            raise RecipeError(f"{kind.__name__} got {known[0].name!r} twice, by position and by name.")
        if first:
            values[known[0].name] = first[0]
        self.config = kind.Config(**options.check(known, values, kind.__name__))

    def due(self, step: Step) -> bool:
        """Whether the plugin's step hooks do anything at this step; whole-step capture runs between due steps."""
        return True

    @classmethod
    def for_setting(cls, setting: str, value: Any) -> dict[str, Any]:
        """Return the options that carry out a setting of the Trainer: by default, the option of the same name.

        An entry point `forge.settings` names the plugin that carries out a setting: `max_time = "package:Plugin"`.
        """
        return {setting: value} if setting in (option.name for option in options.of_config(cls.Config)) else {}

    @classmethod
    def for_plan(cls, given: Mapping[str, Any], task: TaskModule | None) -> Mapping[str, Any] | str | None:
        """Return the options with which `forge plan` tries a plugin that cures `memory` or `activations`.

        A text says why it does not; None, that there is nothing to try. `given` are those of the recipe. `task` has
        shapes and no values; None if it cannot be made so.
        """
        return None

    def __repr__(self) -> str:
        shown = ", ".join(f"{o.name}={getattr(self.config, o.name)!r}" for o in options.of_config(type(self).Config))
        return f"{type(self).__name__}({shown})"


class Callback(Plugin):
    """One function on one event, made by `@forge.on`."""

    def __init__(self, function: Callable[..., Any], event: str, every: Interval | None, mutates: bool):
        super().__init__()
        self.name = getattr(function, "__name__", "callback")
        self.function, self.event, self.every = function, event, every
        self.observer = not mutates
        self.__doc__ = function.__doc__
        setattr(self, event, _as_hook(function, every))

    def due(self, step: Step) -> bool:
        return self.every is None or self.every.due(step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<callback {self.name} on {self.event}{f' every {self.every}' if self.every else ''}>"


def on(
    event: str, *, every: str | Interval | None = None, mutates: bool = False
) -> Callable[[Callable[..., Any]], Callback]:
    """Make the smallest plugin: one function, one event, an interval if wanted.

    ::

        @forge.on("step_end", every="100 updates")
        def watch(step):
            step.record("weight_norm", step.trainer.task.head.weight.norm())

    `event` is a hook of the step or around it, with or without `forge_`. A callback is an observer unless
    `mutates=True` says that it changes the run.
    """
    from forge.contract.stack import EVENTS, SPECS

    name = event if event.startswith("forge_") else f"forge_{event}"
    if name not in EVENTS:
        kind = "is an action, not an event; write a Plugin to wrap or own it" if name in SPECS else "is no event"
        raise StackError(f"@forge.on({event!r}): {name} {kind}.{did_you_mean(name, EVENTS)}")
    interval = Interval(every) if every is not None else None
    if interval is not None and name not in ("forge_step_end", "forge_boundary"):
        raise StackError(
            f"@forge.on({event!r}, every=...): an interval counts finished updates. Use step_end or boundary with it."
        )

    def make(function: Callable[..., Any]) -> Callback:
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise StackError(
                f"@forge.on({event!r}): {function.__name__} is a generator or coroutine; write a function."
            )
        return Callback(function, name, interval, mutates)

    return make


def _as_hook(function: Callable[..., Any], every: Interval | None) -> Callable[..., Any]:
    """Return the function as a hook implementation that runs when its interval is due."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters]
    asked = names if every is None or "step" in names else ["step", *names]
    given = [f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters]
    body = f"return function({', '.join(given)})"
    # pluggy reads what a hook wants from its code, so the gate is written out with the function's own arguments
    source = f"def hook({', '.join(asked)}):\n    {body if every is None else f'if due(step): {body}'}"
    scope: dict[str, Any] = {"function": function, "due": every.due if every is not None else None}
    exec(source, scope)
    return hookimpl(scope["hook"])


def snake_case(name: str) -> str:
    """`GradientNoise` -> `gradient_noise`, `LRFinder` -> `lr_finder`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def plugin_options(plugin: Plugin) -> dict[str, Any]:
    """A plugin's options as plain data."""
    if isinstance(plugin, Callback):
        return {"event": plugin.event, **({"every": str(plugin.every)} if plugin.every else {})}
    return {o.name: options.plain(getattr(plugin.config, o.name)) for o in options.of_config(type(plugin).Config)}
