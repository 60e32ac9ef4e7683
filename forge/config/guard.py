"""Look at a recipe's text before OmegaConf reads it: what would take long, or much memory, is refused with its line.

OmegaConf then holds, merges and resolves what has passed, and decides what `no`, `1:20` and `1e-3` mean.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from forge.errors import RecipeError

SIZE, DEEPEST = 2**17, 20
"""Characters of a recipe with its bases, and levels of nesting."""
LIMITS = {"characters": SIZE, "keys and values": 2_000, "references": 200}
"""What a recipe may hold, with its bases."""
LONGEST = 200
"""Characters of a key."""

_WORD = r"[^\\${}()\[\]:.\s'\"]+"
_REFERENCE = re.compile(rf"\$\{{[ \t]*\.*{_WORD}(?:\.{_WORD}|\[{_WORD}\])*[ \t]*\}}|(?<!\\)(?:\\\\)*\\\$\{{")
"""`${trainer.seed}`, or `${.seed}` for the value beside it; or `\\${`, which is a plain `${`."""


def omegaconf() -> Any:
    """Return the class OmegaConf, or raise an error with the fix."""
    try:
        from omegaconf import OmegaConf
    except ImportError as error:
        raise RecipeError("Recipes need omegaconf: pip install omegaconf, or pass plugins=[...] instead.") from error
    return OmegaConf


class RecipeText(NamedTuple):
    """What a text holds: its values, unresolved, the line of each key, and how much it is."""

    values: Any
    lines: dict[str, int]
    counts: Counter[str]


def read_text(file: Path) -> RecipeText:
    """Read a file, no further than its size is allowed to be."""
    try:
        with file.open(encoding="utf-8", errors="surrogateescape") as stream:
            text = stream.read(SIZE + 1)
    except OSError as error:
        raise RecipeError(f"{file.name} cannot be read: {error}") from error
    return parse(text, file.name)


def parse(text: str, what: str) -> RecipeText:
    """Return what a text holds; `what` is its name. An error begins with it, and with the line."""
    omegaconf()
    values, lines, counts = _parsed(text, what)
    return RecipeText(deepcopy(values), dict(lines), counts)


def refuse_more(counts: Mapping[str, int], where: str) -> None:
    """Raise if a recipe holds more than it may, its bases included."""
    for kind, most in LIMITS.items():
        if counts[kind] > most:
            raise RecipeError(f"{where}: more than {most:,} {kind}, those of its bases included. Write less.")


@lru_cache(maxsize=32)
def _parsed(text: str, what: str) -> RecipeText:
    """Parse a text, once: a process makes many Trainers of one recipe."""
    import yaml

    conf, loader = omegaconf(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        counts = _counted(text, what, loader)
        root = yaml.compose(text, Loader=loader)
        lines = dict(_keys(root, what, counts)) if root is not None else {}
        return RecipeText(conf.to_container(conf.from_dotlist([f"text={text}"]))["text"], lines, counts)
    except RecipeError:
        raise
    except Exception as error:  # yaml's own, and OmegaConf's on a key or value
        mark = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or " ".join(str(error).split())[:500]
        raise RecipeError(f"{what}{f':{mark.line + 1}' if mark else ''} cannot be read as YAML: {said}.") from error


def _counted(text: str, what: str, loader: Any) -> Counter[str]:
    """Return how much a text holds, from its events, which take no memory: it is small, flat and plain, or refused."""
    import yaml

    counts = Counter({"characters": len(text)})
    refuse_more(counts, f"{what}:{text.count(chr(10), 0, SIZE) + 1}")
    if odd := yaml.reader.Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, odd.start()) + 1
        raise RecipeError(f"{what}:{line} has {odd[0]!a}, which is no text. Save the file as UTF-8, without it.")
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        where = f"{what}:{event.start_mark.line + 1}"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise RecipeError(f"{where}: nested deeper than {DEEPEST} levels. Nest less.")
        if getattr(event, "anchor", None) is not None:
            raise RecipeError(f"{where} has an anchor or alias. Write the value, or refer to it: ${{trainer.seed}}.")
        if getattr(event, "tag", None) is not None:
            raise RecipeError(f"{where} has the tag {event.tag[:40]!r}. Write text, numbers, true, false, null, lists.")
        counts["keys and values"] += isinstance(event, yaml.NodeEvent)
        refuse_more(counts, where)
    return counts


def _keys(node: Any, what: str, counts: Counter[str], parent: str = "") -> Iterator[tuple[str, int]]:
    """Yield every key, in full, with its line; look at the keys and values, and count references."""
    if isinstance(node.value, str):
        _check_scalar(node, what, counts)
    elif node.id == "sequence":
        for index, value in enumerate(node.value):
            yield from _keys(value, what, counts, f"{parent}{index}.")
    else:
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key.value, str) or key.tag.endswith(":null") or len(key.value) > LONGEST:
                raise RecipeError(f"{what}:{line} has a key that is no word of up to {LONGEST} characters. Write one.")
            _check_scalar(key, what, counts)
            yield f"{parent}{key.value}", line
            yield from _keys(value, what, counts, f"{parent}{key.value}.")


def _check_scalar(node: Any, what: str, counts: Counter[str]) -> None:
    """Refuse a number that takes long to read, half a sign, which no file can hold, and what is no reference."""
    where = f"{what}:{node.start_mark.line + 1}"
    if node.tag.endswith(":int") and len(node.value) > 20:
        raise RecipeError(f"{where} has a whole number of more than 20 signs. Write a smaller one, or quote it.")
    if any("\ud800" <= sign <= "\udfff" for sign in node.value):
        raise RecipeError(f"{where} has half a sign, which UTF-8 cannot hold. Leave it out.")
    if "${" in _REFERENCE.sub(" ", node.value):
        raise RecipeError(
            f"{where}: {node.value[:80]!r} calls a resolver, or is no reference: a recipe refers only to its own keys, "
            "as in ${trainer.seed}. Give the value on the command line or in Python; for the text ${ write \\${."
        )
    counts["references"] += node.value.count("${")
    refuse_more(counts, where)
