"""JSON from a file that nobody vouches for: bounded in size, values and depth before a parser sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from forge.errors import CheckpointError

Pairs = list[tuple[str, Any]]

# in text without escapes; a string, closed or not, is one match, so that a hostile one is scanned once
_STRINGS = re.compile(r'"[^"]*"?')
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

Outline = Callable[[bytes], object]
"""Looks at JSON text without its strings and spaces; what it gives back is true if the text may be parsed."""


def parse(data: bytes, what: str, max_values: int, outline: Outline, make_object: Callable[[Pairs], Any]) -> Any:
    """Parse ASCII JSON; `make_object` turns the pairs of each object into a value. `what` begins every message."""
    if not data.isascii():
        raise CheckpointError(f"{what} is no JSON of forge: it has bytes beyond ASCII.")
    _refuse_bombs(data, what, max_values)
    text = data.decode("ascii")
    if not outline(_without_strings(text)):
        raise CheckpointError(f"{what} is no valid JSON of its kind, or nested too deeply.")
    try:
        return json.loads(text, object_pairs_hook=make_object, parse_constant=_no_constants)
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{what} is nested too deeply.") from error
    except ValueError as error:
        raise CheckpointError(f"{what} is no valid JSON: {error}") from error


def no_deeper_than(levels: int) -> Outline:
    """An outline of brackets that all close, with no more than so many inside each other."""

    def look(text: bytes) -> bool:
        left = text.translate(_BRACKETS, _NO_BRACKETS)
        for _ in range(levels):  # take away the innermost ones
            left = left.replace(b"[]", b"")
        return not left

    return look


def unique(pairs: Pairs) -> dict[str, Any]:
    """The pairs as a dict; a key that comes twice is refused."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise CheckpointError(f"the key {twice[:80]!r} comes twice.")
    return found


def count_values(data: bytes) -> int:
    """An upper bound of the values that JSON text can hold, without parsing it."""
    return 1 + sum(data.count(sign) for sign in (b"[", b"{", b",", b":"))


def _refuse_bombs(data: bytes, what: str, max_values: int) -> None:
    values = count_values(data)
    if values > max_values:
        raise CheckpointError(f"{what} has about {values:,} values; {max_values:,} is the limit for its size.")
    # text inside strings has its quotes escaped, so more bare quotes than values could use is no JSON
    if data.count(b'"') - data.count(b'\\"') > 2 * values:
        raise CheckpointError(f"{what} is no valid JSON: it has more strings than places for them.")


def _without_strings(text: str) -> bytes:
    unescaped = text.replace(r"\\", "").replace(r"\"", "")
    # as str: joining a million pieces of bytes takes 80 bytes more for each
    return _STRINGS.sub("", unescaped).encode("ascii").translate(None, b" \n\r\t")


def _no_constants(name: str) -> NoReturn:
    raise CheckpointError(f"{name} is no JSON number.")
