"""References between the values of a recipe: `${trainer.seed}`, or `${.seed}` for the value beside it.

A reference names a value that holds no reference itself, and calls no resolver. `\\${` is a plain `${`. OmegaConf fills
references in; here is looked, first, at what that would make.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from forge.errors import RecipeError

SIZE, VALUE = 2**17, 8
"""Characters of a recipe with its bases, and of the values that it makes: theirs, and VALUE for each."""
DEEPEST = 20
"""Levels of nesting."""
Path = tuple[str, ...]
"""The keys that lead to a value."""

_MARK = re.compile(r"(\\*)\$\{")
_WORD = r"[^\\${}()\[\]:.\s'\"]+"
_REFERENCE = re.compile(rf"\$\{{[ \t]*(\.*)({_WORD}(?:\.{_WORD}|\[{_WORD}\])*)[ \t]*\}}")


class Reference(NamedTuple):
    """A `${` in a text: what stands there, the dots before its key, and its key."""

    text: str
    dots: int = 0
    key: str = ""
    refused: str = ""
    "Why it is no reference."


def find(text: str) -> Iterator[Reference]:
    """Yield every reference of a text, and every `${` that is none; one that is escaped has no key."""
    for mark in _MARK.finditer(text):
        begin = mark.end() - 2
        if len(mark[1]) % 2:
            yield Reference("\\${")
        elif found := _REFERENCE.match(text, begin):
            yield Reference(found[0], len(found[1]), found[2])
        else:
            why = "calls a resolver, which is refused" if ":" in text[begin:] else "is no reference"
            yield Reference(text[begin:], refused=why)


def needs_resolving(values: dict[str, Any]) -> bool:
    """Whether a value refers to another, or stands for one that is still to be given."""
    return any("${" in value or value == "???" for _, value in _leaves(values) if isinstance(value, str))


def refuse_growth(values: dict[str, Any], label: Callable[[str], str]) -> None:
    """Refuse references to what the merged recipe lacks, or to references, and values that they make too large.

    An error names the key as `label` words it.
    """
    left = SIZE
    for path, value in _leaves(values):
        found = [each for each in find(value) if each.key] if isinstance(value, str) else []
        here = label(".".join(path)) if found else ""
        for inner, part in [((), value), *(each for one in found for each in _named(values, path, one, here))]:
            left -= VALUE + len(str(part))
            if left < 0:
                raise RecipeError(
                    f"{label('.'.join(path))}: the recipe has more than {SIZE:,} characters once references are filled "
                    "in. Repeat less."
                )
            if len(path) + len(inner) > DEEPEST:
                raise RecipeError(f"{here}: nested deeper than {DEEPEST} levels once it is filled in. Nest less.")


def _named(values: dict[str, Any], path: Path, reference: Reference, here: str) -> Iterator[tuple[Path, Any]]:
    """Yield the values that a reference at `path` fills in."""
    beside = path[: max(len(path) - reference.dots, 0)] if reference.dots else ()
    target: Any = values
    try:
        for step in (*beside, *re.findall(r"[^.\[\]]+", reference.key)):
            target = target[int(step)] if isinstance(target, list) else target[step]
    except (LookupError, ValueError, TypeError):
        named = f"{reference.text[:80]} names {reference.key[:80]!r}"
        raise RecipeError(f"{here}: {named}, which the recipe does not have. Name a key of it.") from None
    for inner, part in _leaves(target):
        if isinstance(part, str) and any(each.key for each in find(part)):
            raise RecipeError(f"{here}: {reference.text[:80]} names a reference, or holds one. Name the value itself.")
        yield inner, part


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value that is no mapping and no list, or an empty one, with the keys that lead to it."""
    if isinstance(value, (dict, list)) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path, value
