"""Modules of a task, chosen by class or by patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from forge.errors import RecipeError

MOST = 12
"""How many names a message lists."""


def chosen(task: nn.Module, patterns: Iterable[str], option: str) -> dict[str, nn.Module]:
    """The modules that the patterns name, by name and in the task's order; a pattern that names none is refused.

    A pattern is a class, or a pattern of module names. Of modules inside each other the outermost is taken. One that is
    never called itself, such as nn.ModuleList, stands for its children.
    """
    inner = {name: module for name, module in task.named_modules() if name}
    matched: set[str] = set()
    for pattern in patterns:
        found = {name for name, module in inner.items() if _matches(pattern, name, module)}
        if not found:
            raise _unknown(pattern, option, task, inner)
        matched |= found
    outermost = [name for name in inner if name in matched and not any(around in matched for around in parents(name))]
    return dict(called for name in outermost for called in _called(name, inner[name]))


def parents(name: str) -> Iterator[str]:
    """The names of the modules that a module is in, outermost first."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        yield ".".join(parts[:end])


def as_list(patterns: str | list[str] | None) -> list[str]:
    """An option that takes one pattern or several."""
    return [patterns] if isinstance(patterns, str) else patterns or []


def listed(names: Iterable[str]) -> str:
    """Names as a message shows them; those of one list as one: "blocks.0-7, head"."""
    return shortened([*_ranges(names)])


def shortened(names: list[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:MOST]) + (f", ... ({len(names)} in all)" if len(names) > MOST else "")


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    return type(module).__name__ == pattern or fnmatchcase(name, pattern)


def _called(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        yield name, module
        return
    for child, inner in module.named_children():
        yield from _called(f"{name}.{child}", inner)


def _ranges(names: Iterable[str]) -> Iterator[str]:
    """Numbered names in a row, joined."""
    begun: tuple[str, int, int] | None = None
    for name in names:
        stem, _, last = name.rpartition(".")
        number = int(last) if last.isdecimal() else None
        if begun is not None and number is not None and begun[0] == stem and begun[2] + 1 == number:
            begun = (stem, begun[1], number)
            continue
        if begun is not None:
            yield _range(*begun)
        begun = None if number is None else (stem, number, number)
        if number is None:
            yield name
    if begun is not None:
        yield _range(*begun)


def _range(stem: str, first: int, last: int) -> str:
    stem = f"{stem}." if stem else ""
    return f"{stem}{first}" if first == last else f"{stem}{first}-{last}"


def _unknown(pattern: str, option: str, task: nn.Module, inner: dict[str, nn.Module]) -> RecipeError:
    kinds = list(dict.fromkeys(type(module).__name__ for module in inner.values()))
    near = difflib.get_close_matches(pattern.strip("*."), [*kinds, *inner], n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return RecipeError(
        f"{option}: {pattern!r} is neither a class nor a name of a module in {type(task).__name__}.{meant} "
        f"Classes: {shortened(kinds)}. Modules: {listed(inner)}."
    )
