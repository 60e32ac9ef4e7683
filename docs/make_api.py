"""Write docs/api.md: the public names of forge with their signatures and what they say of themselves.

    python docs/make_api.py

tests/docs/test_pages.py says so when the page is not what the docstrings say any more.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from forge.cli.plugin_page import parts

PAGE = Path(__file__).parent / "api.md"
MODULES = ["forge", "forge.data", "forge.kernels", "forge.tuning", "forge.testing"]
FIRST = [
    *("Trainer", "TaskModule", "FitResult", "Step", "Interval"),
    *("Plugin", "hookimpl", "on", "load_recipe", "load_weights"),
]
"""The order a reader wants; what is not named here follows."""
ELSEWHERE = {
    "hookimpl": "Marks a method of a plugin as an implementation of the hook that it is named for: [hooks](hooks.md)."
}
"""What has no docstring of its own."""
INTRODUCTION = """\
# Python

The public names, as their docstrings describe them. What a task defines: [a task](task.md). What a plugin can
implement: [hooks](hooks.md). Options of every plugin: [plugins](plugins/README.md). Other modules of forge are its
inside: readable, but they may change."""


def page() -> str:
    """The whole page."""
    return "\n\n".join([INTRODUCTION, *(part for name in MODULES for part in described(import_module(name)))]) + "\n"


def described(module: ModuleType) -> Iterator[str]:
    """A module: what it says of itself, then each of its public names that is no module."""
    yield f"## {module.__name__}"
    if module.__name__ != "forge":
        yield from prose(module)
    values = {name: getattr(module, name) for name in sorted(module.__all__, key=rank)}
    for name, value in values.items():
        if inspect.ismodule(value) or is_error(value):
            continue
        yield f"### {module.__name__}.{name}"
        if callable(value):
            yield f"```python\n{name}{signature(value)}\n```"
        if name in ELSEWHERE:
            yield ELSEWHERE[name]
        else:
            yield from prose(value)
        if inspect.isclass(value):
            yield from members(value)
    errors = [f"| `{name}` | {inspect.getdoc(value)} |" for name, value in values.items() if is_error(value)]
    if errors:
        yield "### Errors"
        yield "\n".join(["| error | what it says |", "|---|---|", *errors])


def rank(name: str) -> tuple[int, str]:
    return FIRST.index(name) if name in FIRST else len(FIRST), name


def is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def prose(thing: Any) -> Iterator[str]:
    text = inspect.getdoc(thing) or ""
    for part in parts(text):
        yield f"```python\n{spaced(part.text)}\n```" if part.is_code else linked(part.text)


def spaced(code: str) -> str:
    """Code as ruff formats it: two lines before a function or a class."""
    return re.sub(r"\n\n+(?=def |class |@)", "\n\n\n", code)


def members(kind: type) -> Iterator[str]:
    """The public methods that the class itself defines, as a table."""
    rows = []
    for name, value in vars(kind).items():
        what = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        text = inspect.getdoc(what.fget if isinstance(what, property) else what) or ""
        own = inspect.isfunction(what) or isinstance(what, property)
        if name.startswith("_") or not own or not text:
            continue
        shown = name if isinstance(what, property) else f"{name}{one_line(signature(what))}"
        words = " ".join(part.text for part in parts(text) if not part.is_code)
        rows.append(f"| `{escaped(shown)}` | {escaped(linked(words))} |")
    if rows:
        yield "\n".join(["| | |", "|---|---|", *rows])


def signature(thing: Any) -> str:
    """Arguments with their types as they are written in the source; long ones get a line each."""
    try:
        # of a class its __init__: a metaclass's __call__ would hide it
        known = inspect.signature(thing.__init__ if inspect.isclass(thing) else thing)
    except (TypeError, ValueError):
        return "(...)"
    words = []
    star = False
    for parameter in known.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            words.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        if parameter.annotation is not parameter.empty:
            parameter = parameter.replace(annotation=Bare(bare(parameter.annotation)))
        words.append(str(parameter.replace(default=plain(parameter.default))))
    after = "" if known.return_annotation in (known.empty, "None", None) else f" -> {bare(known.return_annotation)}"
    line = f"({', '.join(words)}){after}"
    if len(line) <= 100:
        return line
    return "(\n" + "".join(f"    {word},\n" for word in words) + f"){after}"


@dataclass(frozen=True)
class Bare:
    """Something that prints as this text."""

    text: str

    def __repr__(self) -> str:
        return self.text


def bare(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:torch|typing|forge\.\w+|collections\.abc)\.(?=[A-Z])", "", text)


def plain(default: Any) -> Any:
    """A default that prints the same everywhere: no address, no object."""
    if default is inspect.Parameter.empty or default is None or isinstance(default, (bool, int, float, str, tuple)):
        return default
    return Ellipsis


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("( ", "(").replace(", )", ")")


def linked(text: str) -> str:
    """Sphinx's roles as plain code."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)


def escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
