"""Parse JSON from an untrusted file, after bounding its size, number of values and depth."""

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
"""Checks JSON text without its strings and spaces; true if it may be parsed."""


def parse(data: bytes, what: str, max_values: int, outline: Outline, make_object: Callable[[Pairs], Any]) -> Any:
    """Parse ASCII JSON; `make_object` turns the pairs of each object into a value. Every message begins with `what`."""
    if not data.isascii():
        raise CheckpointError(f"{what} is not JSON of forge: it has bytes beyond ASCII.")
    _refuse_bombs(data, what, max_values)
    text = data.decode("ascii")
    if not outline(_without_strings(text)):
        raise CheckpointError(f"{what} is not valid JSON of its kind, or nested too deeply.")
    try:
        return json.loads(text, object_pairs_hook=make_object, parse_constant=_no_constants)
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{what} is nested too deeply.") from error
    except ValueError as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}") from error


def no_deeper_than(levels: int) -> Outline:
    """Return an outline that accepts balanced brackets of at most `levels` levels."""

    def look(text: bytes) -> bool:
        left = text.translate(_BRACKETS, _NO_BRACKETS)
        for _ in range(levels):  # remove the innermost ones
            left = left.replace(b"[]", b"")
        return not left

    return look


def unique(pairs: Pairs) -> dict[str, Any]:
    """Return the pairs as a dict; raise if a key occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise CheckpointError(f"the key {twice[:80]!r} occurs twice.")
    return found


def count_values(data: bytes) -> int:
    """Return an upper bound of the number of values in JSON text, without parsing it."""
    return 1 + sum(data.count(sign) for sign in (b"[", b"{", b",", b":"))


def _refuse_bombs(data: bytes, what: str, max_values: int) -> None:
    values = count_values(data)
    if values > max_values:
        raise CheckpointError(f"{what} has about {values:,} values; the limit for its size is {max_values:,}.")
    # quotes inside strings are escaped, so valid JSON has at most two bare quotes per value
    if data.count(b'"') - data.count(b'\\"') > 2 * values:
        raise CheckpointError(f"{what} is not valid JSON: it has more strings than places for them.")


def _without_strings(text: str) -> bytes:
    unescaped = text.replace(r"\\", "").replace(r"\"", "")
    # as str: joining a million pieces of bytes takes 80 bytes more for each
    return _STRINGS.sub("", unescaped).encode("ascii").translate(None, b" \n\r\t")


def _no_constants(name: str) -> NoReturn:
    raise CheckpointError(f"{name} is not a JSON number.")
