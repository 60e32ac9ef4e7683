"""The schema of a recipe: its options are those of Settings, a plugin's Config, a task class and a data function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forge import options, registry
from forge.config.build import make_plugin
from forge.config.trainer_defaults import Settings
from forge.contract.plugin import Plugin
from forge.errors import ForgeError, RecipeError, did_you_mean
from forge.options import Option

Maker = Callable[..., Any]
"""A task class or a data function."""
TASK = "task"
"""The parameter of a data function that gets the task."""
Config = Mapping[str, Any]
Origin = Mapping[str, str]


def maker_of(section: str, config: Config, local: Mapping[str, Maker], origin: Origin) -> Maker | None:
    """Return the task class or data function: the one given in code, else the one named, else None."""
    if section in local:
        return local[section]
    name = config.get(section, {}).get("name")
    return None if name is None else _load(section, str(name), f"{section}.name", origin)


def options_of(section: str, config: Config, local: Mapping[str, Maker], origin: Origin) -> list[Option] | None:
    """Return the options of a section; None if unknown (options for a task that is given later)."""
    if section == "trainer":
        return list(options.of_config(Settings))
    maker = maker_of(section, config, local, origin)
    return taken_from_recipe(maker, section) if maker else None


def taken_from_recipe(maker: Maker, section: str) -> list[Option]:
    """Return the options of a task class or data function, without what is handed to it: the `task` of a data
    function."""
    return [each for each in options.of_callable(maker) if section != "data" or each.name != TASK]


def check_section(section: str, config: Config, local: Mapping[str, Maker], origin: Origin) -> dict[str, Any]:
    """Return a section as plain data with its defaults, every value checked."""
    given = config.get(section, {})
    known = options_of(section, config, local, origin)
    if known is None:
        return given
    name = {"name": given["name"]} if "name" in given and section in ("task", "data") else {}
    values = {key: value for key, value in given.items() if key not in name}
    return name | _filled(known, _converted(known, values, section, origin))


def label(key: str, origin: Origin) -> str:
    """Return a full key with its origin; a key inside a list has the list's origin."""
    at = key
    while at and at not in origin:
        at = at.rpartition(".")[0]
    return f"{key} ({origin[at]})" if at else key or "The recipe"


def check_plugin(
    name: str, values: Mapping[str, Any], origin: Origin, build: bool = True
) -> tuple[dict[str, Any], Plugin | None]:
    """Return a plugin's options with their defaults, every value checked, and the plugin, unless `build` is False."""
    key, plugin = f"plugins.{name}", None
    kind = _load("plugin", name.partition("@")[0], key, origin)
    known = options.of_config(kind.Config) if hasattr(kind, "Config") else []
    converted = _converted(known, values, key, origin)
    try:
        if build:  # a plugin checks the rules across its options when it is built
            plugin = make_plugin(name, converted)
    except ValueError as error:
        blamed = [label(f"{key}.{option}", origin) for option in converted if _builds_without(name, converted, option)]
        raise RecipeError(f"{' and '.join(blamed) or label(key, origin)}: {error}") from error
    return _filled(known, converted), plugin


def _builds_without(name: str, values: Mapping[str, Any], option: str) -> bool:
    """Whether a plugin that refuses its options can be built without one of them, which is to blame then."""
    try:
        make_plugin(name, {key: value for key, value in values.items() if key != option})
    except (ValueError, TypeError):
        return False
    return True


def _load(kind: str, name: str, key: str, origin: Origin) -> Any:
    try:
        return registry.load(kind, name)
    except ForgeError as error:
        raise RecipeError(f"{label(key, origin)}: {error}") from error


def _converted(known: Sequence[Option], values: Mapping[str, Any], key: str, origin: Origin) -> dict[str, Any]:
    """Convert `values` to their types; an error names the full key, its origin and the fix."""
    by_name = {option.name: option for option in known}
    for name in values:
        if name not in by_name:
            place = label(f"{key}.{name}", origin)
            raise RecipeError(f"{place} is no option of {key.rpartition('.')[2]}.{did_you_mean(str(name), by_name)}")
    for option in known:
        if option.required and option.name not in values:
            kind = options.type_name(option.type)
            otherwise = " Or name a function that makes the task: FILE.py:function." if key == "task" else ""
            raise RecipeError(f"{label(key, origin)} needs a value: set {key}.{option.name} ({kind}).{otherwise}")
    return {
        name: options.convert(value, by_name[name].type, label(f"{key}.{name}", origin))
        for name, value in values.items()
    }


def _filled(known: Sequence[Option], values: Mapping[str, Any]) -> dict[str, Any]:
    return {option.name: options.plain(values.get(option.name, option.default)) for option in known}
