"""Write docs/api.md: the public names of forge with their signatures, docstrings, attributes and methods.

    python docs/make_api.py

tests/docs/test_pages.py fails when the page is out of date.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from forge.cli.plugin_page import parts

PAGE = Path(__file__).parent / "api.md"
MODULES = [
    *("forge", "forge.data", "forge.metrics.drawing", "forge_kernels", "forge.tuning", "forge.testing"),
    *("forge_doctor", "forge_ship.export_formats.plan", "forge_speed.levers"),
]
FIRST = [
    *("Trainer", "Run", "TaskModule", "FitResult", "Step", "Interval"),
    *("Plugin", "hookimpl", "on", "recipe", "load_weights"),
]
"""Names that come first, in this order; the others follow by name."""
ELSEWHERE = {"hookimpl": "Mark a method of a plugin as the implementation of the hook of that name: [hooks](hooks.md)."}
"""Descriptions of names without a docstring of their own."""
INTRODUCTION = """\
# API reference

Every public name of forge, with its docstring; the last three modules are for [packages](writing-packages.md) that
offer a probe, an export format or a lever. See also: how to [write a task](task.md), the [hooks](hooks.md) that a
plugin can implement, and the options of each [plugin](plugins/README.md). All other modules are internal and may
change."""


def page() -> str:
    """Return the whole page."""
    return "\n\n".join([INTRODUCTION, *(part for name in MODULES for part in described(name))]) + "\n"


def described(path: str) -> Iterator[str]:
    """Yield a module's docstring, then each of its public names, then a table of its errors."""
    yield f"## {path}"
    module = import_module(path)
    if path != "forge":
        yield from prose(module)
    values = {name: getattr(module, name) for name in sorted(module.__all__, key=rank)}
    for name, value in values.items():
        if inspect.ismodule(value) or is_error(value):
            continue
        yield f"### {path}.{name}"
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
        yield "\n".join(["| error | meaning |", "|---|---|", *errors])


def rank(name: str) -> tuple[int, str]:
    return FIRST.index(name) if name in FIRST else len(FIRST), name


def is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def prose(thing: Any) -> Iterator[str]:
    text = inspect.getdoc(thing) or ""
    for part in parts(text):
        yield f"```python\n{spaced(part.text)}\n```" if part.is_code else linked(part.text)


def spaced(code: str) -> str:
    """Format code as ruff does, with two blank lines before and after a function or a class."""
    code = re.sub(r"\n\n+(?=def |class |@)", "\n\n\n", code)
    return re.sub(r"^((?:def|class) .*(?:\n+ .*)*)\n\n+(?=\S)", r"\1\n\n\n", code, flags=re.MULTILINE)


def members(kind: type) -> Iterator[str]:
    """Yield the public bases of a class, then its attributes and its methods as tables.

    Attributes come from the class and all its bases in forge; methods from the class and its internal bases, because
    those of a public base are in the section of that base.
    """
    public = documented_classes()
    links = [f"[`{public[base]}`](#{anchor(public[base])})" for base in kind.__mro__[1:] if base in public]
    if links:
        yield f"Inherits from {', '.join(links)}."
    fields: dict[str, str] = {}
    methods: dict[str, str] = {}
    for base in kind.__mro__:
        if base not in public and package(base) != package(kind):
            continue
        for name, annotation, text in attributes(base):
            fields.setdefault(name, f"| `{name}` | {code(annotation)} | {escaped(linked(text))} |")
        for name, value in vars(base).items():
            what = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            text = " ".join(part.text for part in parts(inspect.getdoc(what) or "") if not part.is_code)
            if name.startswith("_") or not text:
                continue
            if isinstance(what, property):
                returns = bare(inspect.signature(what.fget).return_annotation) if what.fget else ""
                fields.setdefault(name, f"| `{name}` | {code(returns)} | {escaped(linked(text))} |")
            elif inspect.isfunction(what) and (base is kind or base not in public):
                shown = escaped(name + one_line(signature(what)))
                methods.setdefault(name, f"| `{shown}` | {escaped(linked(text))} |")
    if fields:
        yield "\n".join(["| attribute | type | meaning |", "|---|---|---|", *fields.values()])
    if methods:
        yield "\n".join(["| method | what it does |", "|---|---|", *methods.values()])


def package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def anchor(heading: str) -> str:
    """Return the id that GitHub and the site give to a heading."""
    return heading.replace(".", "").lower()


def documented_classes() -> dict[type, str]:
    """Return every class that this page has a section for, with its full name."""
    names = [(path, name) for path in MODULES for name in import_module(path).__all__]
    found = {getattr(import_module(path), name): f"{path}.{name}" for path, name in names}
    return {value: name for value, name in found.items() if inspect.isclass(value)}


def attributes(kind: type) -> Iterator[tuple[str, str, str]]:
    """Yield (name, type, description) of each public attribute with a string under it, read from the source.

    Found in the class body, and as `self.name = ...` in its methods.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    methods = [part for part in definition.body if isinstance(part, ast.FunctionDef)]
    for body in (definition.body, *(method.body for method in methods)):
        for statement, below in itertools.pairwise(body):
            match statement, below:
                case (
                    ast.Assign(targets=[target]) | ast.AnnAssign(target=target),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    annotation = getattr(statement, "annotation", None)
                    match target:
                        case ast.Name(id=name) if body is definition.body:
                            pass
                        case ast.Attribute(value=ast.Name(id="self"), attr=name):
                            pass
                        case _:
                            continue
                    if not name.startswith("_"):
                        yield name, bare(ast.unparse(annotation)) if annotation else "", inspect.cleandoc(text)


def code(text: str) -> str:
    return f"`{escaped(text)}`" if text else ""


def signature(thing: Any) -> str:
    """Return the arguments with their types as written in the source; a long signature gets one line per argument."""
    try:
        # of a class its __init__, unless it declares a signature: a metaclass's __call__ would hide it
        declared = inspect.isclass(thing) and "__signature__" not in vars(thing)
        known = inspect.signature(thing.__init__ if declared else thing)
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
    """An object that prints as this text."""

    text: str

    def __repr__(self) -> str:
        return self.text


def bare(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"^ClassVar\[(.*)\]$", r"\1", text)
    return re.sub(r"\b(?:torch|typing|forge\.\w+|collections\.abc)\.(?=[A-Z])", "", text)


def plain(default: Any) -> Any:
    """Return a default that prints the same everywhere, without addresses of objects."""
    if default is inspect.Parameter.empty or default is None or isinstance(default, (bool, int, float, str, tuple)):
        return default
    return Bare("...")


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("( ", "(").replace(", )", ")")


def linked(text: str) -> str:
    """Replace Sphinx roles by plain code."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)


def escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
