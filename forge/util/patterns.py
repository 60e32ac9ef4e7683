"""Select parts of a task by name patterns, list them in messages, and refuse patterns without a match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from forge.errors import RecipeError
from forge.util.text import few

FEW, MANY = 3, 12
"""Number of names that a message lists: as examples, or as the choices."""


def as_list(patterns: str | list[str] | None) -> list[str]:
    """Return an option of one pattern or several as a list."""
    return [patterns] if isinstance(patterns, str) else patterns or []


def parents(name: str) -> Iterator[str]:
    """Yield the names of the modules around a part, outermost first."""
    words = name.split(".")
    for end in range(1, len(words)):
        yield ".".join(words[:end])


def listed(names: Iterable[str], most: int = FEW) -> str:
    """Format names for a message, numbered neighbours as a range: "blocks.0-7, head and 9 more"."""
    return few(_ranges(names), most)


# ---------------------------------------------------------------------------------------------------------------------
# Parameters


def names_of_parameters(task: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its id: a shared parameter has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in task.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def covers(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether a pattern matches one of these names, or a module around one."""
    around = {part for name in names for part in (*parents(name), name)}
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in around)


def parts(task: nn.Module) -> list[str]:
    """Return the modules that have parameters of their own, and the parameters of the task itself."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name, _ in task.named_parameters()))


def unknown(pattern: str, option: str, task: nn.Module) -> RecipeError:
    """Return the error for a pattern without a match: with the nearest name, and all modules with parameters."""
    known = {part for name, _ in task.named_parameters() for part in (*parents(name), name)}
    return RecipeError(
        f"{option}: {pattern!r} matches no parameter of {type(task).__name__}.{_meant(pattern, sorted(known))} "
        f"Its parameters are in {listed(parts(task), MANY)}."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Modules


def chosen(task: nn.Module, patterns: Iterable[str], option: str) -> dict[str, nn.Module]:
    """Return the modules that match the patterns, by name, in the task's order; raise RecipeError for one without.

    A pattern is a class name, or a pattern of module names. Of nested modules the outermost is taken. A module that is
    never called itself, such as nn.ModuleList, stands for its children.
    """
    inner = {name: module for name, module in task.named_modules() if name}
    matched: set[str] = set()
    for pattern in patterns:
        found = {n for n, module in inner.items() if type(module).__name__ == pattern or fnmatchcase(n, pattern)}
        if not found:
            kinds = list(dict.fromkeys(type(module).__name__ for module in inner.values()))
            raise RecipeError(
                f"{option}: {pattern!r} is neither a class nor a name of a module in {type(task).__name__}."
                f"{_meant(pattern, [*kinds, *inner])} Classes: {listed(kinds, MANY)}. Modules: {listed(inner, MANY)}."
            )
        matched |= found
    outermost = [name for name in inner if name in matched and not any(around in matched for around in parents(name))]
    return dict(called for name in outermost for called in _called(name, inner[name]))


def _called(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        yield name, module
        return
    for child, inner in module.named_children():
        yield from _called(f"{name}.{child}", inner)


# ---------------------------------------------------------------------------------------------------------------------
# Text


def _meant(pattern: str, known: list[str]) -> str:
    near = difflib.get_close_matches(pattern.strip("*."), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _ranges(names: Iterable[str]) -> list[str]:
    """Return names, with consecutive numbers joined to a range."""
    runs: list[tuple[str, list[int]]] = []
    for name in names:
        stem, _, last = name.rpartition(".")
        if last.isdecimal() and runs and runs[-1][0] == stem and runs[-1][1] and runs[-1][1][-1] + 1 == int(last):
            runs[-1][1].append(int(last))
        else:
            runs.append((stem, [int(last)]) if last.isdecimal() else (name, []))
    shown = ((stem, "-".join(map(str, dict.fromkeys([*numbers[:1], *numbers[-1:]])))) for stem, numbers in runs)
    return [".".join(filter(None, parts)) for parts in shown]
