"""Building plugins by name, by class or from a mapping of options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from forge import registry
from forge.contract.plugin import Plugin
from forge.errors import StackError


def make_plugins(given: Any) -> list[Plugin]:
    """Build plugins from a list of plugins, classes or names, or from a mapping of name to options.

    In a mapping `None` leaves the plugin out, and `name@label` is a second one with a name of its own.
    """
    if isinstance(given, Mapping):
        return [make_plugin(key, values) for key, values in given.items() if values is not None]
    if isinstance(given, (str, Plugin)) or not isinstance(given, Iterable):
        raise StackError(f"plugins= takes a list or a mapping, not {type(given).__name__}: write plugins=[{given!r}].")
    return [_as_plugin(item) for item in given]


def make_plugin(key: str, values: Mapping[str, Any]) -> Plugin:
    """Build the installed plugin that `key` names, with these options; the part after an @ is only its label."""
    if not isinstance(values, Mapping):
        raise StackError(f"The options of {key!r} are {values!r}: write a mapping, as in {key}: {{option: value}}.")
    name, _, label = key.partition("@")
    if not re.fullmatch(r"[\w-]{0,100}", label):
        raise StackError(
            f"{key[:80]!r} has a label that is no name: use up to 100 letters, digits, - and _ after the @."
        )
    plugin = plugin_class(name)(**values)
    plugin.name = key
    return plugin


def plugin_class(name: str) -> type[Plugin]:
    """Load the class of an installed plugin."""
    kind = registry.load("plugin", name)
    if not (isinstance(kind, type) and issubclass(kind, Plugin)):
        raise StackError(f"The plugin {name!r} is registered as {kind!r}, which is no subclass of forge.Plugin.")
    return kind


def _as_plugin(item: Any) -> Plugin:
    if isinstance(item, Plugin):
        return item
    if isinstance(item, str):
        return make_plugin(item, {})
    if isinstance(item, type) and issubclass(item, Plugin):
        return item()
    if callable(item):
        name = getattr(item, "__name__", item)
        raise StackError(f"{name!r} is a plain function; decorate it with @forge.on(event) to make it a callback.")
    raise StackError(f"{item!r} is no plugin: pass a forge.Plugin, a plugin's name or an @forge.on callback.")
