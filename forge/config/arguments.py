"""The Trainer's arguments: a recipe, plugins and settings become one recipe, its settings and built plugins."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from forge import registry
from forge.config.build import make_plugin, make_plugins
from forge.config.recipe import DEFAULT, Given, Recipe, as_recipe
from forge.config.trainer_defaults import CARRIED, FOLDERS, Settings
from forge.contract.plugin import Plugin, plugin_options
from forge.errors import StackError, did_you_mean

P = ParamSpec("P")
T = TypeVar("T")
Options = Mapping[str, Mapping[str, Any] | None]
Plugins = Iterable[Plugin | type[Plugin] | str] | Options
"""A list of plugins, classes or names, or a mapping of name to options."""


def resolve(
    recipe: Given | None, plugins: Plugins | None, given: Mapping[str, Any]
) -> tuple[Recipe | None, Settings, list[Plugin]]:
    """Return the recipe, the settings and the plugins of a Trainer.

    `given` are the settings passed in code; they win over the recipe's. `plugins` are merged over the recipe's.
    """
    settings = Settings.of(dict(given))  # names and values are checked before anything is read
    if recipe is None and plugins is None:
        recipe = DEFAULT
    own: list[Plugin] | Options | None = None
    if plugins is not None:
        own = cast(Options, plugins) if isinstance(plugins, Mapping) else make_plugins(plugins)
    if recipe is not None and not isinstance(recipe, Recipe):
        replaced = own if isinstance(own, Mapping) else [plugin.name for plugin in own or ()]
        recipe = as_recipe(recipe).checked(replaced)
    if recipe is None:
        return None, *_switched(settings, own if isinstance(own, list) else make_plugins(own))
    recipe = recipe.with_trainer({key: value for key, value in given.items() if key not in FOLDERS})
    return recipe, *_switched(Settings.of({**recipe.trainer, **given}), _merged(recipe, own))


def answers_foreign_arguments(verb: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Make a verb of the Trainer say what an argument of another trainer is called here."""
    known = inspect.signature(verb).parameters

    @functools.wraps(verb)
    def call(trainer: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in known and (answer := registry.hint(verb.__name__, name)):
                raise TypeError(f"Trainer.{verb.__name__} takes no argument {name!r}.{answer}")
        try:
            return verb(trainer, *args, **kwargs)
        except BaseException as error:  # this frame says nothing to the user
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise

    return call


def _switched(settings: Settings, plugins: list[Plugin]) -> tuple[Settings, list[Plugin]]:
    """Add the plugins that carry out settings; for a smoke run, shorten it and leave out what would save it."""
    if settings.smoke:
        every = "1 epoch" if settings.validate_every else None
        ends = {"max_epochs": 1, "max_updates": None, "max_time": None, "min_epochs": None, "min_updates": None}
        first = settings.validate_first or False
        settings = replace(settings, run_dir=False, validate_every=every, validate_first=first, log_every=1, **ends)
        plugins = [plugin for plugin in plugins if getattr(plugin, "forge_save", None) is None]
    asked: dict[type[Plugin], dict[str, Any]] = {}
    for name in CARRIED:
        if value := getattr(settings, name):
            if name not in registry.installed("setting"):
                raise StackError(f"{name}={value!r}: no installed plugin carries out this setting. Leave it out.")
            carrier: type[Plugin] = registry.load("setting", name)
            asked.setdefault(carrier, {}).update(carrier.for_setting(name, value))
        elif value is False:  # a recipe may have the plugin of that name
            plugins = [each for each in plugins if each.name != name]
    for carrier, values in asked.items():
        given = next((plugin_options(plugin) for plugin in plugins if type(plugin) is carrier), {})
        plugins = [*(plugin for plugin in plugins if type(plugin) is not carrier), carrier(**{**given, **values})]
    return settings, plugins


def _merged(recipe: Recipe, own: list[Plugin] | Options | None) -> list[Plugin]:
    """Build the recipe's plugins with `own` merged over them."""
    base: dict[str, Any] = dict(recipe.plugins)
    if own is None:
        return recipe.make_plugins(base)
    if not isinstance(own, Mapping):
        names = {plugin.name for plugin in own}
        return [*recipe.make_plugins(name for name in base if name not in names), *own]
    changed: dict[str, Any] = {}
    for name, values in own.items():
        if values is None and name not in base:
            raise StackError(f"plugins={{{name!r}: None}} removes nothing.{did_you_mean(name, base)}")
        changed[name] = {**base.get(name, {}), **values} if isinstance(values, Mapping) else values
    kept = {plugin.name: plugin for plugin in recipe.make_plugins(name for name in base if name not in changed)}
    names = [name for name in {**base, **changed} if name in kept or changed[name] is not None]
    return [kept[name] if name in kept else make_plugin(name, changed[name]) for name in names]
