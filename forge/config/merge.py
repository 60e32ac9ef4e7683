"""Merge recipe files and command-line overrides, and keep the origin of every key."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge import registry
from forge.config.files import SECTIONS, TOP_LEVEL, Where, check_shape, omegaconf
from forge.config.schema import Maker, label, options_of
from forge.errors import RecipeError, did_you_mean

COMMAND_LINE = "command line"


class Layers:
    """The merged values of the layers added so far, and the origin of each key."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origin: dict[str, str] = {}

    def add(self, layer: Mapping[str, Any], where: Where) -> None:
        """Merge `layer` over the values: mappings merge, anything else replaces, a null plugin is removed."""
        for section in ("task", "data"):
            now, then = self.values.get(section, {}).get("name"), layer.get(section, {}).get("name")
            if now and then and now != then:  # options of another task do not apply
                self.drop(section)
        for name, given in layer.get("plugins", {}).items():
            if given is None and name not in self.values.get("plugins", {}):
                refuse_unknown_plugin(name, f"{where(f'plugins.{name}')}: plugins.{name} cannot be removed")
        self._lay(layer, self.values, where, "")

    def drop(self, key: str) -> None:
        """Delete a key and everything under it."""
        *parents, last = key.split(".")
        holder = self.values
        for parent in parents:
            holder = holder.get(parent, {})
        holder.pop(last, None)
        self._forget(key)

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
            if name not in stack:
                raise RecipeError(f"Cannot remove {name!r}: it is not in the stack.{did_you_mean(name, stack)}")
            self.drop(f"plugins.{name}")

    def override(self, overrides: Sequence[str], local: Mapping[str, Maker]) -> None:
        """Merge "key=value" overrides; `name.option=0.5` is short for `plugins.name.option=0.5`."""
        layer: dict[str, Any] = {}
        for text in overrides:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise RecipeError(f"{text!r} is no override: write key=value, as in trainer.max_epochs=3.")
            parts = self._full_key(key, local)
            holder = layer
            for part in parts[:-1]:
                inner = holder.get(part)
                holder[part] = holder = inner if isinstance(inner, dict) else {}
            holder[parts[-1]] = _parse(key, value)
        check_shape(layer, lambda key: COMMAND_LINE)
        self.add(layer, lambda key: COMMAND_LINE)

    def resolved(self) -> dict[str, Any]:
        """Return the values as plain data, with references between keys resolved; nothing else is evaluated."""
        lib = omegaconf()
        self._refuse_resolvers()
        ordered = {key: self.values[key] for key in TOP_LEVEL if key in self.values}
        try:
            return lib.OmegaConf.to_container(lib.OmegaConf.create(ordered), resolve=True, throw_on_missing=True)
        except lib.errors.OmegaConfBaseException as error:
            key = str(getattr(error, "full_key", None) or "")
            raise RecipeError(f"{label(key, self.origin)}: {str(error).partition(chr(10))[0]}") from error

    def _refuse_resolvers(self) -> None:
        """Raise if a value calls a resolver: ${oc.env:TOKEN} would write a secret into the run folder."""
        for key, text in _texts(self.values):
            name = _resolver_in(text)
            if name:
                raise RecipeError(
                    f"{label(key, self.origin)}: {text!r} calls the resolver {name!r}, which is refused: a recipe "
                    "refers only to its own keys, as in ${trainer.seed}. Give the value itself, on the command line or "
                    "in Python."
                )

    def _lay(self, layer: Mapping[str, Any], onto: dict[str, Any], where: Where, parent: str) -> None:
        for key, value in layer.items():
            name = f"{parent}.{key}" if parent else str(key)
            if parent == "plugins" and value is None:
                self.drop(name)
                continue
            if not (isinstance(value, Mapping) and isinstance(onto.get(key), dict)):
                self._forget(name)
                self.origin[name] = where(name)
                onto[key] = {} if isinstance(value, Mapping) else value
            if isinstance(value, Mapping):
                self._lay(value, onto[key], where, name)

    def _forget(self, key: str) -> None:
        self.origin = {k: at for k, at in self.origin.items() if k != key and not k.startswith(f"{key}.")}

    def _full_key(self, key: str, local: Mapping[str, Maker]) -> list[str]:
        parts = key.split(".")
        stack = self.values.get("plugins", {})
        if parts[0] not in SECTIONS:
            if parts[0].partition("@")[0] not in {*stack, *registry.installed("plugin")}:
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


def _parse(key: str, text: str) -> Any:
    """Read a value as YAML: 1e-3 is a float, [1, 2] a list, null None."""
    import yaml

    lib = omegaconf()
    try:
        return lib.OmegaConf.to_container(lib.OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except (yaml.YAMLError, lib.errors.OmegaConfBaseException) as error:
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        meant = "{}='{}'".format(key, text.replace("'", "''"))
        meant = shlex.quote(meant) if set(meant) & set('"$`\\!') else f'"{meant}"'
        raise RecipeError(
            f"{key}={text} ({COMMAND_LINE}): the value cannot be read as YAML ({problem}). If it is text, quote it for "
            f"YAML, and all of it for the shell: {meant}."
        ) from error


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (full key, text) of every text at every depth, in lists too."""
    if isinstance(value, str):
        yield key, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from _texts(inner, f"{key}.{name}" if key else str(name))


def _resolver_in(text: str) -> str:
    """Return the name of a resolver that a text calls, as OmegaConf's own grammar reads it; empty if none."""
    if "${" not in text:
        return ""
    from omegaconf.errors import GrammarParseError
    from omegaconf.grammar_parser import OmegaConfGrammarParser, parse

    try:
        found = [parse(text)]
    except GrammarParseError:  # refused later, with the reason
        return ""
    for node in found:
        if isinstance(node, OmegaConfGrammarParser.InterpolationResolverContext):
            return str(node.resolverName().getText())  # pyright: ignore[reportOptionalMemberAccess]
        found.extend(getattr(node, "children", None) or ())
    return ""
