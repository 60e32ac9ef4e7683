"""The stack: which plugins run, in which order, checked before any work.

Printed order = call order = outermost to innermost. The order is the one given, moved only as far as `before` and
`after` ask. Everything that can be wrong with a stack is found here and reported in one message that names the fix.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pluggy

from forge.contract import axes
from forge.contract import hooks as contract
from forge.contract.dispatch import Hooks, Instrument, freeze, through_pluggy
from forge.contract.plugin import EFFECTS, Callback, Plugin
from forge.errors import StackError, did_you_mean

SPECS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(spec).parameters)
    for name, spec in vars(contract).items()
    if name.startswith("forge_") and hasattr(spec, "forge_spec")
}
"""Every hook with the names of its arguments."""
ACTIONS = frozenset(name for name in SPECS if getattr(contract, name).forge_spec["firstresult"])
EVENTS = frozenset(SPECS) - ACTIONS
INSIDE = (
    "forge_prepare_batch",
    "forge_micro_step",
    "forge_forward",
    "forge_backward",
    "forge_finalize_grads",
    "forge_inspect_grads",
    "forge_edit_grads",
    "forge_optimizer_step",
)
"""The hooks that run inside an update, and so inside the capture of one."""
CORE, TASK = "core", "task"
ONE_BY_ONE = frozenset({"forge_configure", "forge_state_dict", "forge_load_state_dict", "forge_exception", "forge_end"})
"""Events that the Trainer calls plugin by plugin, so that one cannot keep another from its turn: no wrappers."""


@dataclass(frozen=True, slots=True)
class Call:
    """One implementation of a hook: who, and in which role ("own", "wrap", "default" or "event")."""

    plugin: str
    role: str


class Stack:
    """An ordered set of plugins with unique names."""

    def __init__(self, plugins: Iterable[Plugin] = ()):
        self.plugins: list[Plugin] = []
        self._frozen = False
        self._manager = _NO_PLUGINS
        self._off: set[tuple[str, str]] = set()
        "Hooks that are switched off for now, by plugin."
        for plugin in plugins:
            self.add(plugin)

    def add(self, plugin: Plugin) -> None:
        """Append a plugin; possible until `forge_configure` has returned."""
        self._refuse_if_frozen("add", plugin.name)
        if plugin.name in (CORE, TASK):
            raise StackError(f"No plugin can be called {plugin.name!r}: the kernel uses that name.")
        if plugin.name in self:
            raise StackError(
                f"Two plugins are called {plugin.name!r}. Remove one, or give them names of their own in a mapping: "
                f"plugins={{'{plugin.name}': ..., '{plugin.name}@second': ...}}."
            )
        self.plugins.append(plugin)

    def remove(self, name: str) -> None:
        """Take a plugin out; possible until `forge_configure` has returned."""
        self._refuse_if_frozen("remove", name)
        self.plugins.remove(self[name])

    def resolve(self) -> None:
        """Check every declaration and hook, and bring the plugins into their order."""
        for plugin in self.plugins:
            check_hooks(plugin, f"plugin {plugin.name!r}")
        self._check_declarations()
        self.plugins = _sorted(self.plugins)

    def register(self, core: Plugin, task: Any | None) -> pluggy.PluginManager:
        """Return a pluggy manager that holds core, the task (where it implements hooks) and the stack."""
        if task is not None:
            check_hooks(task, f"the task {type(task).__name__}")
        self._off.clear()
        self._manager = _Manager()
        self._manager.register(core, CORE)
        if task is not None:
            self._manager.register(task, TASK)
        for plugin in reversed(self.plugins):  # pluggy calls the last registered first
            self._manager.register(plugin, plugin.name)
        _refuse_two_owners(self._manager)
        return self._manager

    def switch(self, name: str, hooks: Iterable[str], on: bool) -> None:
        """Leave out hooks of a plugin when they are frozen next, or take them in again."""
        asked = {(name, hook) for hook in hooks}
        self._off = self._off - asked if on else self._off | asked

    def freeze(
        self,
        trace: Callable[[str], Any] | None = None,
        instrument: Instrument | None = None,
        hooks: Hooks | None = None,
        names: Iterable[str] = SPECS,
    ) -> Hooks:
        """Freeze every hook of the registered stack, or those named again, into the `hooks` given.

        With `trace`, each goes through pluggy, which prints its calls to it.
        """
        if trace is not None:
            self._manager.trace.root.setwriter(trace)
            self._manager.enable_tracing()
        hooks = Hooks() if hooks is None else hooks
        for name in names:
            off = [self._manager.get_plugin(plugin) for plugin, hook in self._off if hook == name]
            caller = self._manager.subset_hook_caller(name, off) if off else getattr(self._manager.hook, name)
            setattr(hooks, name, through_pluggy(caller) if trace is not None else freeze(caller, instrument))
        return hooks

    def _impls(self, hook: str) -> list[pluggy.HookImpl]:
        """Return who is called, outermost first."""
        impls = reversed(getattr(self._manager.hook, hook).get_hookimpls())  # pluggy keeps its list last-called first
        return [impl for impl in impls if (impl.plugin_name, hook) not in self._off]

    def lock(self) -> None:
        """From here on the stack cannot change."""
        self._frozen = True

    def reset(self, plugins: Sequence[Plugin]) -> None:
        """Go back to these plugins, as they were before a run configured itself."""
        self.plugins, self._frozen = list(plugins), False

    def calls(self) -> dict[str, list[Call]]:
        """Per hook, who is called, outermost first: what `forge plan` prints."""
        table: dict[str, list[Call]] = {}
        for hook in SPECS:
            table[hook] = [Call(impl.plugin_name, _role(hook, impl)) for impl in self._impls(hook)]
        return table

    def implementations(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """Per plugin, in call order, the function that takes the hook's arguments by position; for ONE_BY_ONE hooks."""
        return [(impl.plugin_name, _by_position(impl, SPECS[hook])) for impl in self._impls(hook)]

    def blame(self, error: BaseException) -> tuple[str, str] | None:
        """The (plugin, hook) whose code was running innermost when `error` was raised, read from its traceback."""
        owners = {}
        for hook in SPECS:
            for impl in getattr(self._manager.hook, hook).get_hookimpls():
                function = impl.plugin.function if isinstance(impl.plugin, Callback) else impl.function
                code = getattr(inspect.unwrap(function), "__code__", None)
                owners.setdefault(code, []).append((impl, hook))
        found, trace = None, error.__traceback__
        while trace is not None:
            for impl, hook in owners.get(trace.tb_frame.f_code, ()):
                me = trace.tb_frame.f_locals.get("self", impl.plugin)
                if me is impl.plugin or isinstance(impl.plugin, Callback):
                    found = (impl.plugin_name, hook)
            trace = trace.tb_next
        return found

    def __contains__(self, name: str) -> bool:
        return any(plugin.name == name for plugin in self.plugins)

    def __getitem__(self, name: str) -> Plugin:
        for plugin in self.plugins:
            if plugin.name == name:
                return plugin
        raise StackError(f"No plugin of this stack is called {name!r}.{did_you_mean(name, self.names)}")

    def __iter__(self) -> Iterator[Plugin]:
        return iter(self.plugins)

    def __len__(self) -> int:
        return len(self.plugins)

    @property
    def names(self) -> list[str]:
        return [plugin.name for plugin in self.plugins]

    def _refuse_if_frozen(self, verb: str, name: str) -> None:
        if self._frozen:
            raise StackError(f"Cannot {verb} {name!r}: the stack is fixed once forge_configure has returned.")

    def _check_declarations(self) -> None:
        providers: dict[str, str] = {}
        for plugin in self.plugins:
            for thing in plugin.provides:
                if thing in providers:
                    other = self[providers[thing]]
                    near = axes.instead([other, plugin]) if thing == axes.STRATEGY else ""
                    raise StackError(
                        f"{other.name!r} and {plugin.name!r} both provide {thing!r}: only one can. Remove one.{near}"
                    )
                providers[thing] = plugin.name
        axes.refuse_apart(self.plugins)
        there = {**{name: name for name in self.names}, **providers}
        for plugin in self.plugins:
            for need in plugin.requires:
                if need not in there:
                    fix = f"Add a plugin that does (for instance -p {need}), or remove {plugin.name!r}."
                    fix = plugin.requires[need] if isinstance(plugin.requires, Mapping) else fix
                    missing = f"{need!r}, which nothing in this stack is or provides"
                    raise StackError(f"{plugin.name!r} requires {missing}. {fix}")
            for other in plugin.conflicts:
                if other in there and there[other] != plugin.name:
                    brings = "" if there[other] == other else f", which brings {other!r}"
                    instead = f"Remove one of them{', or set it so that it does without' if brings else ''}."
                    if isinstance(plugin.conflicts, Mapping):
                        instead = plugin.conflicts[other]
                    raise StackError(f"{plugin.name!r} cannot run together with {there[other]!r}{brings}. {instead}")
            for effect in plugin.effects:
                if effect not in EFFECTS:
                    raise StackError(
                        f"{plugin.name!r} declares the effect {effect!r}; known are {', '.join(EFFECTS)}."
                        f"{did_you_mean(effect, EFFECTS)}"
                    )
            for title, pattern in plugin.charts.items():
                _check_chart(plugin.name, title, pattern)


def _check_chart(plugin: str, title: str, pattern: str) -> None:
    section, _, name = title.partition("/")
    if not section or not name:
        raise StackError(f"{plugin!r} declares a chart {title!r}; write its section and its title: 'section/title'.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise StackError(
            f"{plugin!r}: the chart {title!r} has the pattern {pattern!r}, which is no regular expression: {error}."
        ) from None


def check_hooks(plugin: Any, who: str) -> None:
    """Refuse misspelt, unmarked and ill-formed hooks by name."""
    for name in dir(type(plugin)) if not isinstance(plugin, Plugin) else dir(plugin):
        if not name.startswith("forge_"):
            continue
        if name not in SPECS:
            raise StackError(f"{who} defines {name}, which is no hook of forge.{did_you_mean(name, SPECS)}")
        method = getattr(plugin, name)
        if method is not None:
            _check_hook(name, method, who)


def _check_hook(name: str, method: Any, who: str) -> None:
    marks = getattr(method, "forge_impl", None)
    if marks is None:
        raise StackError(f"{who}: {name} is not marked. Put @forge.hookimpl above it.")
    if marks.get("hookwrapper"):
        raise StackError(f"{who}: {name} uses hookwrapper=True, pluggy's old form. Write @hookimpl(wrapper=True).")
    if marks.get("tryfirst") or marks.get("trylast"):
        raise StackError(
            f"{who}: {name} asks for tryfirst or trylast. The stack's order decides; declare `before` or `after`."
        )
    function = inspect.unwrap(method)
    if marks.get("wrapper") and not inspect.isgeneratorfunction(function):
        raise StackError(f"{who}: {name} is marked as a wrapper, but has no yield. Yield once, where the rest runs.")
    if marks.get("wrapper") and name in ONE_BY_ONE:
        raise StackError(f"{who}: {name} cannot be wrapped: it is called plugin by plugin. Implement it plainly.")
    if not marks.get("wrapper") and inspect.isgeneratorfunction(function):
        raise StackError(f"{who}: {name} yields, but is not marked as a wrapper. Write @forge.hookimpl(wrapper=True).")
    for argument in inspect.signature(method).parameters.values():
        if argument.name not in SPECS[name]:
            raise StackError(
                f"{who}: {name} asks for {argument.name!r}, which it does not get. It can take: "
                f"{', '.join(SPECS[name])}."
            )
        if argument.default is not argument.empty:
            raise StackError(f"{who}: {name} gives {argument.name!r} a default; hook arguments have none.")


class _Manager(pluggy.PluginManager):
    def __init__(self):
        super().__init__(contract.PROJECT)
        self.add_hookspecs(contract)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        # only hooks are looked at: a task's properties must not run because it was registered
        return super().parse_hookimpl_opts(plugin, name) if name in SPECS else None


_NO_PLUGINS = _Manager()


def _role(hook: str, impl: pluggy.HookImpl) -> str:
    if impl.wrapper:
        return "wrap"
    if hook in EVENTS:
        return "event"
    return "default" if impl.plugin_name == CORE else "own"


def _by_position(impl: pluggy.HookImpl, spec: Sequence[str]) -> Callable[..., Any]:
    places = [spec.index(name) for name in impl.argnames]
    return lambda *args: impl.function(*(args[place] for place in places))


def _refuse_two_owners(manager: pluggy.PluginManager) -> None:
    for hook in ACTIONS:
        impls = getattr(manager.hook, hook).get_hookimpls()
        owners = [impl.plugin_name for impl in impls if not impl.wrapper and impl.plugin_name != CORE]
        if len(owners) > 1:
            first, second = sorted(owners)[:2]
            raise StackError(
                f"{first!r} and {second!r} both own {hook}, and an action is done once. Remove one of them, or make "
                "one a wrapper (@forge.hookimpl(wrapper=True))."
            )


def _sorted(plugins: list[Plugin]) -> list[Plugin]:
    """Return the plugins in the given order, changed only where `before` and `after` require it."""
    behind: dict[str, set[str]] = {plugin.name: set() for plugin in plugins}  # name -> those that must come first
    for plugin in plugins:
        for other in plugins:
            if other is not plugin:
                labels = {other.name, other.name.partition("@")[0], *other.provides}
                if labels & set(plugin.after):
                    behind[plugin.name].add(other.name)
                if labels & set(plugin.before):
                    behind[other.name].add(plugin.name)
    sorter, place = TopologicalSorter(behind), {plugin.name: i for i, plugin in enumerate(plugins)}
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(map(repr, reversed(error.args[1])))
        raise StackError(
            f"These plugins each want to stand behind the next: {cycle}. Remove one, or drop a `before` or `after`."
        ) from None
    ready: list[str] = []
    ordered: list[str] = []
    while sorter.is_active():
        ready += sorter.get_ready()
        ordered.append(min(ready, key=place.__getitem__))
        ready.remove(ordered[-1])
        sorter.done(ordered[-1])
    return [plugins[place[name]] for name in ordered]
