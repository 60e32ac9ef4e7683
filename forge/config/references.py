"""References between the keys of a recipe: `${trainer.seed}`. Nothing else is evaluated, and the result is bounded.

The language is OmegaConf's without its resolvers: absolute keys and relative ones (`${.seed}`, `${..task.lr}`), indices
(`${task.sizes[0]}`), keys that are references themselves (`${task.${task.name}}`), text around them, and `\\${` for a
plain `${`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from forge.errors import RecipeError
from forge.util.budget import DEEPEST, VALUE, Budget

Path = tuple[Any, ...]
"""The keys that lead to a value."""
MISSING = "???"

_INSIDE = re.compile(r"\$\{|\}")
_WORD = r"[^\\${}()\[\]:.\s'\"]+"
_KEY = re.compile(rf"[ \t]*(\.*)((?:{_WORD}|\[{_WORD}\])(?:\.{_WORD}|\[{_WORD}\])*)[ \t]*")


def resolved(values: Mapping[str, Any], label: Callable[[str], str]) -> dict[str, Any]:
    """Return the values with every reference replaced; an error names the key that holds it, as `label` words it."""
    return _Resolver(values, label).at(())


class _Resolver:
    def __init__(self, values: Mapping[str, Any], label: Callable[[str], str]):
        self.values, self.label = values, label
        self.budget = Budget("The recipe")
        self.made: dict[Path, Any] = {}
        self.open: dict[Path, None] = {}

    def at(self, path: Path) -> Any:
        """Return the value of a key, made once."""
        if path not in self.made:
            if path in self.open:
                raise self.refused(next(reversed(self.open)), f"it refers to {_dotted(path)!r}, which contains it.")
            if len(self.open) > 2 * DEEPEST:
                raise self.refused(path, f"references lead on for more than {2 * DEEPEST} steps. Refer to the first.")
            self.open[path] = None
            self.budget.spend(VALUE)
            self.made[path] = self._make(self._raw(path), path)
            del self.open[path]
        return self.made[path]

    def refused(self, path: Path, why: str) -> RecipeError:
        return RecipeError(f"{self.label(_dotted(path))}: {why}")

    def _raw(self, path: Path) -> Any:
        value: Any = self.values
        for key in path:
            value = value[key]
        return value

    def _make(self, raw: Any, path: Path) -> Any:
        if isinstance(raw, Mapping):
            return {key: self.at((*path, key)) for key in raw}
        if isinstance(raw, list):
            return [self.at((*path, index)) for index in range(len(raw))]
        if raw == MISSING:
            raise self.refused(path, f"the value is {MISSING}, which stands for one that is still to be given.")
        if not isinstance(raw, str):
            return raw
        self.budget.spend(len(raw))
        return self._filled(raw, path) if "${" in raw else raw

    def _filled(self, raw: str, path: Path) -> Any:
        """Return a text with its references filled in; of one that stands alone, the value itself."""
        parts: list[str] = []
        at = 0
        while (begin := raw.find("${", at)) >= 0:
            text = raw[at:begin].rstrip("\\")
            slashes = begin - at - len(text)
            parts += [text, "\\" * (slashes // 2)]
            at = begin + 2
            if slashes % 2:
                parts.append("${")
                continue
            key, at = self._key(raw, at, path)
            value = self._target(key, path)
            size, depth = _measured(value)
            self.budget.spend(size, len(path) + depth)
            if at == len(raw) and not any(parts):
                return deepcopy(value)
            parts.append(str(value))
        return "".join([*parts, raw[at:]])

    def _key(self, raw: str, at: int, path: Path, level: int = 1) -> tuple[str, int]:
        """Return the key of the reference whose inside begins at `at`, with those in it filled in, and its end."""
        key = ""
        while found := _INSIDE.search(raw, at):
            key += raw[at : found.start()]
            at = found.end()
            if ":" in key:
                break
            if found[0] == "}":
                return key, at
            if level > DEEPEST:
                raise self.refused(path, f"references are nested deeper than {DEEPEST} levels. Nest less.")
            inner, at = self._key(raw, at, path, level + 1)
            value = self._target(inner, path)
            if type(value) not in (str, int):
                raise self.refused(path, f"{inner!r} is part of a key, but is neither text nor a whole number.")
            self.budget.spend(len(str(value)))
            key += str(value)
        if ":" in key:
            name = key.partition(":")[0][:80]
            raise self.refused(
                path,
                f"{raw[:80]!r} calls the resolver {name!r}, which is refused: a recipe refers only to its own keys, as "
                "in ${trainer.seed}. Give the value itself, on the command line or in Python.",
            )
        raise self.refused(path, f"{raw[:80]!r} has a ${{ without its }}. For the text ${{ write \\${{.")

    def _target(self, key: str, path: Path) -> Any:
        """Return the value that a key refers to, from the place of the reference."""
        found = _KEY.fullmatch(key)
        dots = len(found[1]) if found else 0
        if found is None or dots > len(path):
            raise self.refused(path, f"{key[:80]!r} is no key of a recipe; refer to one as in ${{trainer.seed}}.")
        here: Path | None = path[: len(path) - dots] if dots else ()
        value: Any = None
        for step in re.findall(r"[^.\[\]]+", found[2]):
            value = value if here is None else self._raw(here)
            if here is not None and isinstance(value, str) and "${" in value:  # the way leads through a reference
                here, value = None, self.at(here)
            try:
                name = range(len(value))[int(step)] if isinstance(value, list) else step
                value, here = value[name], None if here is None else (*here, name)
            except (LookupError, ValueError, TypeError):
                raise self.refused(path, f"it refers to {key[:80]!r}, which the recipe does not have.") from None
        return value if here is None else self.at(here)


def _measured(value: Any) -> tuple[int, int]:
    """Return the size of a value, and its depth."""
    if not isinstance(value, (dict, list)):
        return VALUE + (len(value) if isinstance(value, str) else 0), 1
    inside = [_measured(part) for part in (value.values() if isinstance(value, dict) else value)]
    keys = sum(len(str(key)) for key in value) if isinstance(value, dict) else 0
    return VALUE + keys + sum(size for size, _ in inside), 1 + max((depth for _, depth in inside), default=0)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
