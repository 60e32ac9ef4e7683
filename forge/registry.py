"""Installed plugins, recipes, tasks, data sets, kernels and commands, found through entry points.

Only package metadata is read; an entry is imported when it is loaded by name, so a broken third-party package breaks
only runs that use it.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any

from forge.errors import ForgeError, did_you_mean

GROUPS = {
    "plugin": "forge.plugins",
    "recipe": "forge.recipes",
    "task": "forge.tasks",
    "data": "forge.data",
    "kernel": "forge.kernels",
    "command": "forge.commands",
}


@cache
def installed(kind: str) -> dict[str, EntryPoint]:
    """Return every installed entry of a kind of `GROUPS` by name, without importing any."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUPS[kind]):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ForgeError(
                f"Two packages offer the {kind} {entry.name!r}: {origin(other)} ({other.value}) and "
                f"{origin(entry)} ({entry.value}). Uninstall one of them."
            )
    return dict(sorted(found.items()))


def load(kind: str, name: str) -> Any:
    """Import the entry `name`; raise ForgeError with similar names if it is missing, or its package if it fails."""
    entries = installed(kind)
    if name not in entries:
        raise ForgeError(f"No {kind} is called {name!r}.{did_you_mean(name, entries)}")
    entry = entries[name]
    try:
        return entry.load()
    except Exception as error:
        raise ForgeError(
            f"The {kind} {name!r} of {origin(entry)} cannot be imported ({entry.value}): "
            f"{type(error).__name__}: {error}. Repair or uninstall that package."
        ) from error


def origin(entry: EntryPoint) -> str:
    """Return the distribution that ships an entry, with its version."""
    return _name_and_version(entry.dist) if entry.dist else "an unknown package"


@cache
def _name_and_version(package: Distribution) -> str:
    """Read once: a package's metadata holds its whole README."""
    return f"{package.name} {package.version}"


def summary(entry: EntryPoint) -> str:
    """Return the first line of an entry's docstring, read from its source without importing it; "" if unreadable."""
    source = _source_file(entry.module)
    if source is None:
        return ""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""
    if not entry.attr:
        return (ast.get_docstring(tree) or "").strip().partition("\n")[0]
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == entry.attr:
            return (ast.get_docstring(node) or "").strip().partition("\n")[0]
    return ""


def _source_file(module: str) -> Path | None:
    parts = Path(*module.split("."))
    for folder in sys.path:
        for candidate in (Path(folder or ".") / parts.with_suffix(".py"), Path(folder or ".") / parts / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None
