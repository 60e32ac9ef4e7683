"""`forge plugins`: what is installed, from metadata; with a name, one plugin's documentation."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, Namespace

from rich.text import Text

from forge import hooks, options, registry
from forge.cli import show, target
from forge.errors import StackError
from forge.options import Option
from forge.plugin import Plugin
from forge.stack import ACTIONS, SPECS

DECLARATIONS = ("provides", "requires", "conflicts", "before", "after", "observer", "capturable", "replays")


def parser() -> ArgumentParser:
    parser = target.new_parser("plugins", "List installed plugins, or show one's options and hooks.")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a plugin to show")
    return parser


def run(args: Namespace) -> int:
    return _show(args.name) if args.name else _list()


def _list() -> int:
    """Read from package metadata and source alone, so that a broken package is listed like any other."""
    grid = show.table("plugin", "what it does", "package", wrap=["what it does"])
    for name, entry in registry.installed("plugin").items():
        grid.add_row(name, registry.summary(entry), registry.origin(entry))
    console = show.console()
    console.print(grid)
    console.print("\nforge plugins NAME shows one; forge fit RECIPE -p NAME adds it.", style="dim")
    return 0


def _show(name: str) -> int:
    kind = registry.load("plugin", name)
    if not (isinstance(kind, type) and issubclass(kind, Plugin)):
        raise StackError(f"The plugin {name!r} is registered as {kind!r}, which is no subclass of forge.Plugin.")
    entry = registry.installed("plugin")[name]
    console = show.console()
    console.print(Text.assemble((name, "bold"), (f"  {registry.origin(entry)}, {entry.value}", "dim")), soft_wrap=True)
    console.print()
    console.print(_paragraphs(inspect.getdoc(kind) or "(no description)"), markup=False)
    console.print()
    known = options.of_config(kind.Config)
    if known:
        grid = show.table("option", "type", "default", "what it is for", wrap=["type", "what it is for"])
        for option in known:
            grid.add_row(Text(option.name), Text(options.type_name(option.type)), _default(option), Text(option.doc))
        console.print(grid)
    else:
        console.print(Text("no options", "dim"))
    console.print()
    _print_declarations(kind)
    grid = show.table("hook", "role", "when", wrap=["when"])
    for hook, role in _hooks(kind):
        grid.add_row(hook, role, Text(_when(hook), "dim"))
    console.print(grid)
    return 0


def _default(option: Option) -> Text:
    return (
        Text("required", "yellow")
        if option.required
        else Text("null" if option.default is None else str(option.default))
    )


def _print_declarations(kind: type[Plugin]) -> None:
    declared = {name: getattr(kind, name) for name in DECLARATIONS if getattr(kind, name)}
    if declared:
        words = [name if value is True else f"{name} {', '.join(value)}" for name, value in declared.items()]
        console = show.console()
        console.print(Text("; ".join(words)))
        console.print()


def _hooks(kind: type[Plugin]) -> list[tuple[str, str]]:
    """Each hook of the class with its role; an instance may drop some."""
    found = []
    for hook in SPECS:
        marks = getattr(getattr(kind, hook, None), "forge_impl", None)
        if marks is not None:
            role = "wraps" if marks.get("wrapper") else "owns" if hook in ACTIONS else "event"
            found.append((hook, role))
    return found


def _when(hook: str) -> str:
    """The first sentence of the hook's own documentation, after "Event." or "Action."."""
    text = " ".join((inspect.getdoc(getattr(hooks, hook)) or "").split())
    text = text.removeprefix("Event. ").removeprefix("Action. ")
    return text.partition(". ")[0].removesuffix(".")


def _paragraphs(text: str) -> str:
    """A docstring whose lines flow to the terminal's width; indented parts (code) stay as they are."""
    parts = text.split("\n\n")
    return "\n\n".join(part if "\n " in f"\n{part}" else " ".join(part.split()) for part in parts)
