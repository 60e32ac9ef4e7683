"""Parts of a task by patterns of their names, and what to say of a pattern that matches nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from forge.errors import RecipeError

MOST = 12
"""How many modules a message lists."""


def names_of_parameters(task: nn.Module) -> dict[int, list[str]]:
    """Every name that a parameter goes by, by identity: one that is used in two places has two."""
    names: dict[int, list[str]] = {}
    for name, parameter in task.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def covers(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether a pattern matches one of these names, or a module that it is in."""
    around = {name[:end] for name in names for end in [*_dots(name), len(name)]}
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in around)


def _dots(name: str) -> list[int]:
    return [place for place, letter in enumerate(name) if letter == "."]


def parts(task: nn.Module) -> list[str]:
    """The modules that have parameters of their own, and the parameters of the task itself."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name, _ in task.named_parameters()))


def unknown(pattern: str, option: str, task: nn.Module) -> RecipeError:
    """What to say of an option's pattern that matches nothing: the nearest name, and the modules there are."""
    there = parts(task)
    known = {name[:end] for name, _ in task.named_parameters() for end in [*_dots(name), len(name)]}
    near = difflib.get_close_matches(pattern.strip("*."), sorted(known), n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return RecipeError(
        f"{option}: {pattern!r} matches no parameter of {type(task).__name__}.{meant} Its parameters are in "
        f"{', '.join(there[:MOST])}{', ...' if len(there) > MOST else ''}."
    )
