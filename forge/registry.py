"""What installed packages offer: plugins, recipes, tasks, commands, public names and more, found by entry points.

Only package metadata is read; an entry is imported when it is loaded by name, so a broken third-party package breaks
only runs that use it. forge names none of the packages around it, except in `packages.toml`, which says what to install
for a name that is missing; and it names no plugin, but asks what the installed ones declare.
"""

from __future__ import annotations

import ast
import logging
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from typing import Any

from forge.errors import ForgeError, did_you_mean

GROUPS = {
    "plugin": "forge.plugins",
    "recipe": "forge.recipes",
    "task": "forge.tasks",
    "data": "forge.data",
    "kernel": "forge.kernels",
    "command": "forge.commands",
    "name": "forge.names",
    "hint": "forge.hints",
    "format": "forge.export_formats",
    "probe": "forge.probes",
    "lever": "forge.levers",
    "storage": "forge.storage",
    "setting": "forge.settings",
    "strategy": "forge.strategies",
}
"""A kind of thing, and its group of entry points."""


NEEDS = {
    "command": ("parser", "run"),
    "format": ("FILE", "TOLERANCE", "write", "open_file|read_file"),
    **dict.fromkeys(("plugin", "task", "data", "hint", "probe", "lever", "strategy", "setting"), ("__call__",)),
}
"""What an entry of a kind must have to be used."""
REPAIR = "Repair or uninstall that package."
MALFORMED = f"The {{kind}} {{name!r}} of {{package}} is malformed ({{why}}). {REPAIR}"

_malformed: dict[tuple[str, str], str] = {}
"""Why entries are left out, by kind and name."""


@cache
def installed(kind: str) -> dict[str, EntryPoint]:
    """Return every installed entry of a kind of `GROUPS` by name, without importing any; not those that are malformed,
    which `to_install` explains."""
    found: dict[str, EntryPoint] = {}
    for entry in _entries(GROUPS[kind]):
        if entry.pattern.match(entry.value) is None:
            why = f"{entry.value!r} is no MODULE:NAME"
            _malformed[kind, entry.name] = MALFORMED.format(kind=kind, name=entry.name, package=origin(entry), why=why)
            continue
        if _offered(kind, entry.name) and not _exists(entry.module.partition(".")[0]):
            continue  # the metadata of a package around the core outlived it
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ForgeError(
                f"Two packages offer the {kind} {entry.name!r}: {origin(other)} ({other.value}) and "
                f"{origin(entry)} ({entry.value}). Uninstall one of them."
            )
    return dict(sorted(found.items()))


def _entries(group: str) -> Iterator[EntryPoint]:
    """Yield the entries of a group, of each package once; one whose list of them cannot be read has none."""
    seen: dict[str, object] = {}
    for package in distributions():
        try:
            entries = [entry for entry in package.entry_points if entry.group == group]
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            _warn_once(f"Repair or uninstall the package {package.name}: its entry points cannot be read ({said}).")
            continue
        if entries and seen.setdefault(package.name, package) is package:
            yield from entries


@cache
def _warn_once(text: str) -> None:
    logging.getLogger("forge").warning(text)


def load(kind: str, name: str) -> Any:
    """Import the entry `name`; raise ForgeError with similar names if it is missing, or its package if it fails."""
    entries = installed(kind)
    if name not in entries:
        raise ForgeError(to_install(kind, name) or f"No {kind} is called {name!r}.{did_you_mean(name, entries)}")
    entry = entries[name]
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:
        raise _failure(kind, name, error, f"cannot be imported ({entry.value})") from error
    lacks = [need for need in NEEDS.get(kind, ()) if not any(hasattr(found, each) for each in need.split("|"))]
    if lacks:
        without = " and ".join(lacks).replace("|", " or ")
        why = f"{entry.value} is of type {type(found).__name__}, without {without}"
        raise ForgeError(MALFORMED.format(kind=kind, name=name, package=origin(entry), why=why))
    return found


def call(kind: str, name: str, *args: Any, of: type | None = None) -> Any:
    """Call the function of an entry. Whatever it raises is raised as one line that names the entry and its package.

    With `of` it yields things of that type: they are returned as a list.
    """
    function = load(kind, name)
    try:
        found = function(*args)
        if of is None:
            return found
        things = list(found)
        for thing in things:
            if not isinstance(thing, of):
                raise TypeError(f"it yields a {type(thing).__name__}, which is no {of.__name__}")
        return things
    except Exception as error:
        raise _failure(kind, name, error) from error


def call_or_leave_out(kind: str, name: str, *args: Any, of: type | None = None) -> Any:
    """Call the function of an entry; warn, and return None, where that fails."""
    try:
        return call(kind, name, *args, of=of)
    except ForgeError as error:
        _warn_once(str(error))
        return None


@contextmanager
def blamed(kind: str, name: str, doing: str) -> Iterator[None]:
    """Name the entry and its package in what its code raises, except in a ForgeError, which was written for users."""
    try:
        yield
    except ForgeError:
        raise
    except Exception as error:
        raise _failure(kind, name, error, f"failed to {doing}") from error


def _failure(kind: str, name: str, error: BaseException, what: str = "failed") -> ForgeError:
    """Return the line for what an entry raised: the entry, its package, the error, that package's line, the cure."""
    entry = installed(kind)[name]
    said = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
    package = entry.module.partition(".")[0]
    frames = [(frame.f_globals.get("__name__"), frame, line) for frame, line in walk_tb(error.__traceback__)]
    own = [
        f"{frame.f_code.co_filename}:{line}" for name, frame, line in frames if str(name).partition(".")[0] == package
    ]
    place = f" ({own[-1]})" if own else ""
    cure = "" if entry.dist and entry.dist.name in packages() else f" {REPAIR}"
    shortened = " ".join(said.split())[:500].rstrip(".")
    return ForgeError(f"The {kind} {name!r} of {origin(entry)} {what}: {shortened}{place}.{cure}")


def to_install(kind: str, name: str) -> str:
    """Return the line that says which package has a missing name; "" if none of those around the core has it."""
    installed(kind)
    return _malformed.get((kind, name)) or _offered(kind, name)


def _offered(kind: str, name: str) -> str:
    for package, offers in packages().items():
        if name in offers.get(kind, ()):
            return f"The {kind} {name!r} is in the package {package}, which is not installed: pip install {package}."
    return ""


def public(name: str) -> Any:
    """Return what an installed package offers under a public name (`forge.NAME`); raise AttributeError if none does."""
    if name not in installed("name"):
        room, _, last = f"forge.{name}".rpartition(".")
        raise AttributeError(to_install("name", name) or f"module {room!r} has no attribute {last!r}")
    return load("name", name)


@cache
def libraries() -> frozenset[str]:
    """Return the packages of machinery, which no user wrote: forge, and those that offer more than tasks and data."""
    kinds = GROUPS.keys() - {"recipe", "task", "data"}
    return frozenset(
        {"forge", *(entry.module.partition(".")[0] for kind in kinds for entry in installed(kind).values())}
    )


def hint(about: str, name: str) -> str:
    """Return what installed packages say about a name that forge does not have; "" if they know none.

    `about` says where it was used: "Trainer" (an argument), a verb ("fit"), or "task" (an attribute).
    """
    return next(filter(None, (call_or_leave_out("hint", source, about, name) for source in installed("hint"))), "")


@cache
def packages() -> dict[str, dict[str, list[str]]]:
    """Return the packages around the core, installed or not, with the names that each offers by kind."""
    return tomllib.loads((Path(__file__).parent / "packages.toml").read_text())


@cache
def _exists(package: str) -> bool:
    return package in sys.modules or find_spec(package) is not None


def origin(entry: EntryPoint) -> str:
    """Return the distribution that ships an entry, with its version."""
    return _name_and_version(entry.dist) if entry.dist else "an unknown package"


@cache
def _name_and_version(package: Distribution) -> str:
    """Read once: a package's metadata holds its whole README."""
    return f"{package.name} {package.version}"


# -- what plugins declare ---------------------------------------------------------------------------------------------


def declared(what: str) -> dict[str, Any]:
    """Return a declaration of every installed plugin that makes it, by the plugin's name: `declared("provides")`.

    It is read from the source, as a literal in the body of the class; a plugin is imported only where it may be
    elsewhere: computed, or inherited. One that cannot be imported declares nothing.
    """
    found = {name: _declaration(entry, what) for name, entry in installed("plugin").items()}
    return {name: value for name, value in found.items() if value is not None}


@cache
def _declaration(entry: EntryPoint, what: str) -> Any:
    with suppress(LookupError):
        return _written(entry.module, entry.attr, what)
    with suppress(ForgeError):
        return getattr(load("plugin", entry.name), what, None)
    return None


def _written(module: str, kind: str, what: str) -> Any:
    """Return what a class or its base declares in its source, None without; raise LookupError if that cannot tell."""
    found = _definition(module, kind)
    if not isinstance(found, ast.ClassDef) or len(found.bases) != 1:
        raise LookupError
    for node in found.body:
        names = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(name, ast.Name) and name.id == what for name in names):
            try:
                return ast.literal_eval(node.value)  # pyright: ignore[reportAttributeAccessIssue]
            except ValueError:
                raise LookupError from None
    base = found.bases[0]
    name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
    if name == "Plugin":
        return None
    imports = [node for node in getattr(_tree(module), "body", ()) if isinstance(node, ast.ImportFrom)]
    homes = [node.module or "" for node in imports if name in (alias.name for alias in node.names)]
    return _written(homes[0] if homes else module, name, what)


def providers(thing: str) -> list[str]:
    """Return the installed plugins that provide a thing."""
    return [name for name, things in declared("provides").items() if thing in things]


def cures(problem: str, beside: Iterable[Any] = (), **values: Any) -> list[str]:
    """Return what installed plugins do about a problem, with `values` filled in; not those whose place in the stack
    `beside` is taken."""
    taken = {thing for plugin in beside for thing in plugin.provides}
    things = declared("provides")
    return [
        problems[problem].format(name=name, **values)
        for name, problems in declared("cures").items()
        if problem in problems and taken.isdisjoint(things.get(name, ()))
    ]


def advice(problem: str, sentence: str, **values: Any) -> str:
    """Return a sentence with the cures of a problem in the place of {}; "" if no installed plugin has one."""
    found = cures(problem, **values)
    return sentence.replace("{}", ", or ".join(found)) if found else ""


# -- source, read without importing it --------------------------------------------------------------------------------


def summary(entry: EntryPoint) -> str:
    """Return the first line of an entry's docstring, read from its source without importing it; "" if unreadable."""
    found = _definition(entry.module, entry.attr)
    return "" if found is None else (ast.get_docstring(found) or "").strip().partition("\n")[0]


def _definition(module: str, name: str) -> ast.Module | ast.ClassDef | ast.FunctionDef | None:
    """Return a class or function of a module, or with no name the module; None if its source cannot be read."""
    tree = _tree(module)
    if tree is None or not name:
        return tree
    found = (node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name)
    return next(found, None)


@cache
def _tree(module: str) -> ast.Module | None:
    source = _source_file(module)
    with suppress(OSError, SyntaxError, UnicodeDecodeError):
        return None if source is None else ast.parse(source.read_text(encoding="utf-8"))
    return None


def constant(entry: EntryPoint, name: str) -> str:
    """Return a text that a module gives a name to at its top, read from its source without importing it."""
    for node in getattr(_tree(entry.module), "body", ()):
        if isinstance(node, ast.Assign) and any(isinstance(x, ast.Name) and x.id == name for x in node.targets):
            with suppress(ValueError):
                return str(ast.literal_eval(node.value))
    return ""


def _source_file(module: str) -> Path | None:
    parts = Path(*module.split("."))
    for folder in sys.path:
        for candidate in (Path(folder or ".") / parts.with_suffix(".py"), Path(folder or ".") / parts / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None
