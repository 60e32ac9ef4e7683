"""`forge plugins`: list installed plugins; with a name, show that plugin's documentation."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, Namespace

from rich.padding import Padding
from rich.text import Text

from forge import options, registry
from forge.cli import plugin_page
from forge.config.build import plugin_class
from forge.errors import ForgeError
from forge.util import show


def parser() -> ArgumentParser:
    parser = show.new_parser("plugins", "List installed plugins, or show one's options and hooks.")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a plugin to show")
    parser.add_argument("--markdown", action="store_true", help="print its page as Markdown, for a package's docs")
    return parser


def run(args: Namespace) -> int:
    if args.markdown:
        if not args.name:
            raise ForgeError("--markdown prints the page of one plugin. Write: forge plugins NAME --markdown")
        print(plugin_page.markdown(args.name), end="")
        return 0
    return _show(args.name) if args.name else _list()


def _list() -> int:
    """List plugins from package metadata and source alone, so that a broken package is listed too."""
    grid = show.table("plugin", "what it does", "package", wrap=["what it does"])
    for name, entry in registry.installed("plugin").items():
        grid.add_row(name, registry.summary(entry), registry.origin(entry))
    console = show.console()
    console.print(grid)
    console.print("\nforge plugins NAME shows one; forge fit RECIPE -p NAME adds it.", style="dim")
    return 0


def _show(name: str) -> int:
    kind = plugin_class(name)
    entry = registry.installed("plugin")[name]
    console = show.console()
    console.print(Text.assemble((name, "bold"), (f"  {registry.origin(entry)}, {entry.value}", "dim")), soft_wrap=True)
    console.print()
    for part in plugin_page.parts(inspect.getdoc(kind) or "(no description)"):
        console.print(Padding(Text(part.text, "cyan"), (0, 0, 0, 4)) if part.is_code else Text(part.text))
        console.print()
    known = options.of_config(kind.Config)
    if known:
        grid = show.table("option", "type", "default", "what it is for", wrap=["type", "what it is for"])
        for option in known:
            default = Text(plugin_page.default_of(option), "yellow" if option.required else "")
            grid.add_row(Text(option.name), Text(options.type_name(option.type)), default, Text(option.doc))
        console.print(grid)
    else:
        console.print(Text("no options", "dim"))
    console.print()
    if plugin_page.declared(kind):
        console.print(Text("; ".join(plugin_page.declared(kind))))
        console.print()
    grid = show.table("hook", "role", "when", wrap=["when"])
    for hook, role in plugin_page.implemented(kind):
        grid.add_row(hook, role, Text(plugin_page.when(hook), "dim"))
    console.print(grid)
    return 0
