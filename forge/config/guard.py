"""Look at a recipe's text before OmegaConf reads it: what would take long, or much memory, is refused with its line.

OmegaConf then holds, merges and resolves what has passed, and decides what `no`, `1:20` and `1e-3` mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from forge.config import references
from forge.config.references import DEEPEST, SIZE
from forge.errors import RecipeError

LIMITS = {"characters": SIZE, "keys and values": 2_000, "references": 200}
"""What a recipe may hold, with its bases."""
LONGEST = 200
"""Characters of a key."""

_LONG_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_:]{20,}|0x[0-9a-fA-F_]{17,}|0b[01_]{65,})")
_SURROGATE = re.compile("[\ud800-\udfff]")


def omegaconf() -> Any:
    """Return the class OmegaConf, or raise an error with the fix."""
    try:
        from omegaconf import OmegaConf
    except ImportError as error:
        raise RecipeError("Recipes need omegaconf: pip install omegaconf, or pass plugins=[...] instead.") from error
    return OmegaConf


class RecipeGuard:
    """Reads the texts of one recipe: its file, and those of its bases. What they may hold, they may hold together."""

    def __init__(self, left: Mapping[str, int] = LIMITS) -> None:
        self.left = dict(left)

    def read(self, file: Path) -> tuple[Any, dict[str, int]]:
        """Return the values of a file, unresolved, and the line of each key."""
        try:
            with file.open(encoding="utf-8", errors="surrogateescape") as stream:
                text = stream.read(SIZE + 1)
        except OSError as error:
            raise RecipeError(f"{file.name} cannot be read: {error}") from error
        return self.parse(text, file.name)

    def parse(self, text: str, what: str) -> tuple[Any, dict[str, int]]:
        """Return the values of a text, unresolved, and the line of each key; `what` is the name of the text."""
        omegaconf()
        values, lines, self.left = _parsed(text, what, tuple(self.left.items()))
        return deepcopy(values), dict(lines)

    def _parse(self, text: str, what: str) -> tuple[Any, dict[str, int], dict[str, int]]:
        """As `parse`, and what is left then."""
        conf = omegaconf()
        try:
            lines = self._lines(text, what)
            held = conf.from_dotlist([f"text={text}"])
            return conf.to_container(held)["text"], lines, self.left
        except RecipeError:
            raise
        except Exception as error:  # yaml's own, and those of int(), float() and OmegaConf on a key or value
            mark = getattr(error, "problem_mark", None)
            said = getattr(error, "problem", None) or " ".join(str(error).split())[:500]
            raise RecipeError(f"{what}{f':{mark.line + 1}' if mark else ''} cannot be read as YAML: {said}.") from error

    def _lines(self, text: str, what: str) -> dict[str, int]:
        """Return the line of each key; raise a RecipeError, with the line, for what is refused."""
        import yaml

        self._spend("characters", len(text), f"{what}:{text.count(chr(10), 0, SIZE) + 1}")
        if odd := yaml.reader.Reader.NON_PRINTABLE.search(text):
            line = text.count("\n", 0, odd.start()) + 1
            raise RecipeError(f"{what}:{line} has {odd[0]!a}, which is no text. Save the file as UTF-8, without it.")
        lines: dict[str, int] = {}
        open_levels: list[_Level] = []
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            where = f"{what}:{event.start_mark.line + 1}"
            if isinstance(event, yaml.CollectionEndEvent):
                open_levels.pop()
            if not isinstance(event, yaml.NodeEvent):
                continue
            self._spend("keys and values", 1, where)
            is_scalar = isinstance(event, yaml.ScalarEvent)
            _refuse_notation(event, where)
            if open_levels and open_levels[-1].expects_key:
                open_levels[-1].take_key(event.value if is_scalar else None, where)
                lines[".".join(level.key for level in open_levels)] = event.start_mark.line + 1
                continue
            if open_levels:
                open_levels[-1].take_value()
            if is_scalar:
                self._check_value(event.value, event.implicit[0], where)
            elif len(open_levels) == DEEPEST:
                raise RecipeError(f"{where}: nested deeper than {DEEPEST} levels. Nest less.")
            else:
                open_levels.append(_Level(isinstance(event, yaml.MappingStartEvent)))
        return lines

    def _check_value(self, text: str, is_plain: bool, where: str) -> None:
        if is_plain and _LONG_NUMBER.fullmatch(text):
            raise RecipeError(f"{where} has a whole number beyond 64 bits. Write a smaller one, or quote it as text.")
        for reference in references.find(text):
            self._spend("references", 1, where)
            if why := reference.refused:
                raise RecipeError(
                    f"{where}: {reference.text[:80]!r} {why}: a recipe refers only to its own keys, as in "
                    "${trainer.seed}. Give the value on the command line or in Python; for the text ${ write \\${."
                )

    def _spend(self, kind: str, number: int, where: str) -> None:
        self.left[kind] -= number
        if self.left[kind] < 0:
            raise RecipeError(f"{where}: more than {LIMITS[kind]:,} {kind}, those of its bases included. Write less.")


@lru_cache(maxsize=32)
def _parsed(text: str, what: str, left: tuple[tuple[str, int], ...]) -> tuple[Any, dict[str, int], dict[str, int]]:
    """Parse the same text once: a process makes many Trainers of one recipe."""
    return RecipeGuard(dict(left))._parse(text, what)


class _Level:
    """A mapping or list that is not closed yet: the key or index of its latest value, and the keys that it had."""

    def __init__(self, is_mapping: bool):
        self.is_mapping = self.expects_key = is_mapping
        self.key, self.keys, self.items = "", set[str](), 0

    def take_key(self, key: str | None, where: str) -> None:
        if key in (None, "", "~", "null") or len(key) > LONGEST:
            raise RecipeError(f"{where} has a key that is no word of at most {LONGEST} characters. Write one.")
        if key in self.keys:
            raise RecipeError(f"{where} has the duplicate key {key!r}. Leave one of them out.")
        self.keys.add(key)
        self.key, self.expects_key = key, False

    def take_value(self) -> None:
        self.expects_key = self.is_mapping
        if not self.is_mapping:
            self.key, self.items = str(self.items), self.items + 1


def _refuse_notation(event: Any, where: str) -> None:
    """Refuse anchors, aliases, tags and halves of a sign."""
    if getattr(event, "anchor", None) is not None:
        raise RecipeError(f"{where} has an anchor or alias. Write the value itself, or refer to it: ${{trainer.seed}}.")
    if getattr(event, "tag", None) is not None:
        raise RecipeError(f"{where} has the tag {event.tag[:40]!r}. Write text, numbers, true, false, null and lists.")
    if half := _SURROGATE.search(getattr(event, "value", "")):
        raise RecipeError(f"{where} has {half[0]!a}, which UTF-8 cannot hold. Leave it out.")
