"""Parse YAML from an untrusted text into plain data, bounded in size and depth while it is parsed.

An alias counts as a copy of what it names. As for OmegaConf, `1e-3` is a number, a date is text, and keys are unique.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from forge.errors import RecipeError
from forge.util.budget import LONGEST, MOST, VALUE, Budget

_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_EXPONENT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
"""Numbers that YAML 1.1 takes for text."""


class _BoundedLoader(yaml.SafeLoader):
    """Composes nodes as SafeLoader does, within a budget."""

    yaml_implicit_resolvers = {
        sign: [rule for rule in rules if rule[0] != _TIMESTAMP]
        for sign, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, what: str):
        self.budget, self.depth = Budget(what), 0
        self.taken: dict[int, tuple[int, int]] = {}
        "The size of each finished node, and its depth."
        super().__init__(text)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        self.budget.spend(VALUE, self.depth)
        before = self.budget.left
        node = super().compose_node(parent, index)  # the very node that an alias names
        self.depth -= 1
        if node is None:
            return None
        if id(node) in self.taken:
            size, levels = self.taken[id(node)]
            self.budget.spend(size, self.depth + levels)
        elif isinstance(node, yaml.ScalarNode):
            self.budget.spend(len(node.value))
            if isinstance(parent, yaml.MappingNode) and index is None and len(node.value) > LONGEST:
                raise RecipeError(
                    f"{self.budget.what} has a key of more than {LONGEST} characters: {node.value[:40]!r}…"
                )
            self.taken[id(node)] = len(node.value), 1
        elif node.end_mark is None:  # a collection that is not finished: only an alias in it can have led to it
            raise RecipeError(f"{self.budget.what} contains itself: an alias names a value that it is inside of.")
        else:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            keys = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
            if len(keys) > len({*keys}):
                twice = next(key for at, key in enumerate(keys) if key in keys[:at])
                line = node.start_mark.line + 1
                raise RecipeError(f"{self.budget.what}: the mapping in line {line} has the duplicate key {twice!r}.")
            inside = [part for pair in pairs for part in pair] or node.value
            levels = 1 + max((self.taken[id(part)][1] for part in inside), default=0)
            self.taken[id(node)] = before - self.budget.left, levels
        return node


def read(file: Path) -> str:
    """Return the text of a file, which is read no further than its size is allowed to be."""
    try:
        with file.open(encoding="utf-8") as stream:
            return stream.read(MOST + 1)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{file.name} cannot be read: {error}") from error


def compose(text: str, what: str) -> tuple[Any, yaml.Node | None]:
    """Return a document as plain data, and its root; raise a RecipeError that begins with `what` if it cannot be read,
    or is too large."""
    Budget(what).spend(len(text))
    try:
        loader = _BoundedLoader(text, what)
        root = loader.get_single_node()
        values = None if root is None else loader.construct_document(root)
    except RecipeError:
        raise
    except Exception as error:  # yaml's own, and those of int(), float() and dict() on what a tag claims
        said = " ".join(str(error).split())[:500]
        raise RecipeError(f"{what} cannot be read as YAML: {said}") from error
    _refuse_others(values, what)
    return values, root


def load(text: str, what: str) -> Any:
    """Return a document as plain data."""
    return compose(text, what)[0]


def _refuse_others(value: Any, what: str) -> None:
    """Raise unless a value is what JSON can hold, with numbers of 64 bits."""
    if isinstance(value, (dict, list)):
        for part in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
            _refuse_others(part, what)
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= sign <= "\udfff" for sign in value):
            raise RecipeError(f"{what} has a text that UTF-8 cannot hold: {value[:40]!a}.")
    elif type(value) is int:
        if not -(2**63) <= value < 2**64:
            raise RecipeError(f"{what} has a whole number beyond 64 bits. Write a smaller one, or quote it as text.")
    elif value is not None and not isinstance(value, (bool, float)):
        raise RecipeError(
            f"{what} has a {type(value).__name__}. Write text, numbers, true, false, null, lists and mappings of these."
        )


_BoundedLoader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
