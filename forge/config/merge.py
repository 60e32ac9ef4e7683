"""Merge recipe files and command-line overrides, and keep the origin of every key."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from forge import registry
from forge.config.files import SECTIONS, TOP_LEVEL, Where, check_shape
from forge.config.guard import DEEPEST, LONGEST, omegaconf, parse, refuse_more
from forge.config.references import resolve
from forge.config.schema import Maker, label, options_of
from forge.errors import RecipeError, did_you_mean

COMMAND_LINE = "command line"


class Layers:
    """The merged values of the layers added so far, and the origin of each key."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origin: dict[str, str] = {}
        self.absent: set[str] = set()
        """Plugins that a recipe wrote as `NAME?` and that are not installed: to remove one is no mistake."""

    def add(self, layer: Mapping[str, Any], where: Where) -> None:
        """Merge `layer` over the values: mappings merge, anything else replaces, a null plugin is removed."""
        for section in ("task", "data"):
            now, then = self.values.get(section, {}).get("name"), layer.get(section, {}).get("name")
            if now and then and now != then:  # options of another task do not apply
                self.drop(section)
        removed = [name for name, given in layer.get("plugins", {}).items() if given is None]
        for name in removed:
            if name.endswith("?"):
                self.absent.add(name.removesuffix("?"))
            elif name not in {*self.values.get("plugins", {}), *self.absent}:
                refuse_unknown_plugin(name, f"{where(f'plugins.{name}')}: plugins.{name} cannot be removed")
        for key, value in _all(layer):
            if isinstance(value, Mapping):
                self.origin.setdefault(key, where(key))
            else:
                self.origin[key] = where(key)
        if self.values and layer:
            conf = omegaconf()
            self.values = conf.to_container(conf.unsafe_merge(_without_replaced(self.values, layer), layer))
        else:
            self.values = self.values or deepcopy(dict(layer))
        for name in removed:
            self.drop(f"plugins.{name}")

    def drop(self, key: str) -> None:
        """Delete a key and everything under it."""
        *parents, last = key.split(".")
        holder = self.values
        for parent in parents:
            holder = holder.get(parent, {})
        holder.pop(last, None)
        for inside in [name for name in self.origin if name == key or name.startswith(f"{key}.")]:
            del self.origin[inside]

    def change_stack(self, add: Sequence[str], remove: Sequence[str]) -> None:
        """Add plugins with their defaults and remove others, by name."""
        if not add and not remove:
            return
        stack: dict[str, Any] = self.values.setdefault("plugins", {})
        for name in add:
            refuse_unknown_plugin(name, f"Cannot add {name!r}")
            if name not in stack:
                stack[name] = {}
                self.origin[f"plugins.{name}"] = COMMAND_LINE
        for name in remove:
            if name not in {*stack, *self.absent}:
                raise RecipeError(f"Cannot remove {name!r}: it is not in the stack.{did_you_mean(name, stack)}")
            self.drop(f"plugins.{name}")

    def override(self, overrides: Sequence[str], local: Mapping[str, Maker]) -> None:
        """Merge "key=value" overrides; `name.option=0.5` is short for `plugins.name.option=0.5`."""
        layer: dict[str, Any] = {}
        counts: Counter[str] = Counter()
        for text in overrides:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise RecipeError(f"{text!r} is no override: write key=value, as in trainer.max_epochs=3.")
            parts = self._full_key(key, local)
            if len(parts) > DEEPEST:
                raise RecipeError(f"{key[:80]} ({COMMAND_LINE}) is nested deeper than {DEEPEST} levels. Nest less.")
            holder = layer
            for part in parts[:-1]:
                inner = holder.get(part)
                holder[part] = holder = inner if isinstance(inner, dict) else {}
            holder[parts[-1]] = _parse(key, value, counts)
        check_shape(layer, lambda key: COMMAND_LINE)
        self.add(layer, lambda key: COMMAND_LINE)

    @property
    def ordered(self) -> dict[str, Any]:
        """The values, with references as they are written."""
        return {key: self.values[key] for key in TOP_LEVEL if key in self.values}

    def resolved(self) -> dict[str, Any]:
        """Return the values as plain data, with references between keys resolved; nothing else is evaluated."""
        return resolve(self.ordered, lambda key: label(key, self.origin))

    def _full_key(self, key: str, local: Mapping[str, Maker]) -> list[str]:
        parts = key.split(".")
        stack = self.values.get("plugins", {})
        if parts[0] not in SECTIONS:
            if parts[0].partition("@")[0] not in {*stack, *self.absent, *registry.installed("plugin")}:
                raise self._unknown_root(parts[0], local)
            parts = ["plugins", *parts]
        if parts[0] == "plugins" and len(parts) > 2 and parts[1] not in stack:
            refuse_unknown_plugin(parts[1], f"{key} ({COMMAND_LINE})")
            raise RecipeError(
                f"{key} ({COMMAND_LINE}): the plugin {parts[1]!r} is not in this stack. Add it with -p {parts[1]}."
            )
        return parts

    def _unknown_root(self, root: str, local: Mapping[str, Maker]) -> RecipeError:
        """Return the error for `max_epochs=3` (a missing section) or for an unknown word."""
        for section in ("trainer", "task", "data"):
            known = options_of(section, self.values, local, self.origin) or []
            if root in (option.name for option in known):
                return RecipeError(f"{root!r} ({COMMAND_LINE}) lacks its section. Did you mean '{section}.{root}'?")
        near = did_you_mean(root, {*SECTIONS, *self.values.get("plugins", {}), *registry.installed("plugin")})
        return RecipeError(f"{root!r} ({COMMAND_LINE}) is neither a section of a recipe nor a plugin.{near}")


def plain(values: Mapping[str, Any], said: Callable[[str], str]) -> dict[str, Any]:
    """Return values, or a DictConfig, as plain data, with references resolved by OmegaConf; `said` words a key."""
    from omegaconf.errors import OmegaConfBaseException

    conf = omegaconf()
    try:
        held = values if conf.is_config(values) else conf.create(values)
        return conf.to_container(held, resolve=True, throw_on_missing=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        why = str(error.msg or error).partition("\n")[0]
        raise RecipeError(f"{said(str(error.full_key or ''))}: {why}") from error


def _all(values: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every (full key, value), mappings too."""
    for key, value in values.items():
        name = f"{parent}.{key}" if parent else str(key)
        yield name, value
        if isinstance(value, Mapping):
            yield from _all(value, name)


def _without_replaced(values: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without the texts that `layer` replaces: OmegaConf would merge into what a reference names."""
    return {
        key: _without_replaced(value, layer[key])
        if isinstance(value, Mapping) and isinstance(layer.get(key), Mapping)
        else value
        for key, value in values.items()
        if key not in layer or not isinstance(value, str)
    }


def leaves(values: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every (full key, value); a value is no mapping, or an empty one."""
    for key, value in values.items():
        name = f"{parent}.{key}" if parent else str(key)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, name)
        else:
            yield name, value


def refuse_unknown_plugin(name: str, problem: str) -> None:
    """Raise an error that begins with `problem` unless a plugin of that name is installed."""
    known, base = registry.installed("plugin"), name.partition("@")[0]
    if base not in known:
        missing = registry.to_install("plugin", base)
        raise RecipeError(f"{problem}: {missing or f'no plugin {base!r} is installed.{did_you_mean(base, known)}'}")


def _parse(key: str, text: str, counts: Counter[str]) -> Any:
    """Read a value as YAML (1e-3 is a float, [1, 2] a list, null None), and count it."""
    try:
        read = parse(text, COMMAND_LINE)
        counts.update(read.counts)
        refuse_more(counts, COMMAND_LINE)
        return read.values
    except RecipeError as error:
        problem = getattr(error.__cause__, "problem", None) or error
        if len(text) > LONGEST or "${" in text:
            raise RecipeError(f"{key[:80]}={text[:40]}: {error}") from error
        meant = "{}='{}'".format(key, text.replace("'", "''"))
        meant = shlex.quote(meant) if set(meant) & set('"$`\\!') else f'"{meant}"'
        raise RecipeError(
            f"{key}={text} ({COMMAND_LINE}): the value cannot be read as YAML ({problem}). If it is text, quote it for "
            f"YAML, and all of it for the shell: {meant}."
        ) from error
