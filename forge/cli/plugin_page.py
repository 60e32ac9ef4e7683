"""A plugin's documentation, from its class: docstring, Config, declarations and hooks; also as a Markdown page."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from forge import options
from forge.config.build import plugin_class
from forge.contract import hooks
from forge.contract.plugin import Plugin
from forge.contract.stack import ACTIONS, SPECS
from forge.options import Option

DECLARATIONS = ("provides", "requires", "conflicts", "before", "after", "observer", "effects", "capturable")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a docstring: text to be wrapped, or code to be kept unchanged."""

    text: str
    is_code: bool = False


def parts(docstring: str) -> Iterator[Part]:
    """Split a docstring into paragraphs, lists and code, which `::` introduces."""
    for block in re.split(r"\n\n+(?! )", docstring):  # code may have blank lines; text after it is not indented
        head, colons, code = block.partition("::\n\n")
        if colons and code.startswith(" "):
            if head.strip():
                yield Part(" ".join(head.split()) + ":")
            yield Part(textwrap.dedent(code).strip("\n"), is_code=True)
        elif re.search(r"^[-*] ", block, flags=re.MULTILINE):
            yield Part(block)
        else:
            yield Part(" ".join(block.split()))


def examples(kind: type[Plugin]) -> list[str]:
    """Return the command lines in a plugin's docstring."""
    code = [part.text for part in parts(inspect.getdoc(kind) or "") if part.is_code]
    return [line for text in code for line in text.splitlines() if line.startswith("forge ")]


def default_of(option: Option) -> str:
    return "required" if option.required else "null" if option.default is None else str(option.default)


def declared(kind: type[Plugin]) -> list[str]:
    """Return the declarations of the class in words; an instance may drop some."""
    values = {name: getattr(kind, name) for name in DECLARATIONS if getattr(kind, name)}
    return [name if value is True else f"{name} {', '.join(value)}" for name, value in values.items()]


def implemented(kind: type[Plugin]) -> list[tuple[str, str]]:
    """Return each hook of the class with its role; an instance may drop some."""
    found = []
    for hook in SPECS:
        marks = getattr(getattr(kind, hook, None), "forge_impl", None)
        if marks is not None:
            role = "wraps" if marks.get("wrapper") else "owns" if hook in ACTIONS else "event"
            found.append((hook, role))
    return found


def when(hook: str) -> str:
    """Return the first sentence of the hook's documentation, after "Event." or "Action."."""
    text = " ".join((inspect.getdoc(getattr(hooks, hook)) or "").split())
    text = text.removeprefix("Event. ").removeprefix("Action. ")
    return text.partition(". ")[0].removesuffix(".")


def markdown(name: str, title: str = "") -> str:
    """Return the page of an installed plugin, for its users: no hooks."""
    kind = plugin_class(name)
    lines = [f"# {title or name}", ""]
    for part in parts(inspect.getdoc(kind) or "(no description)"):
        if part.is_code:
            language = "bash" if part.text.startswith("forge ") else "python"
            lines += [f"```{language}", part.text, "```", ""]
        else:
            lines += [part.text, ""]
    package = kind.__module__.partition(".")[0]
    place = package if hasattr(import_module(package), kind.__name__) else kind.__module__
    lines += [f"In Python: `from {place} import {kind.__name__}`.", ""]
    known = options.of_config(kind.Config)
    if known:
        lines += ["## Options", "", "| option | type | default | what it is for |", "|---|---|---|---|"]
        for option in known:
            words = f"`{option.name}`", options.type_name(option.type), f"`{default_of(option)}`", option.doc
            lines.append(f"| {' | '.join(word.replace('|', '/') for word in words)} |")
        lines.append("")
    return "\n".join(lines)
